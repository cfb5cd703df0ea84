"""A stand-in for vLLM, first on PYTHONPATH where the tests want the services without an engine."""
