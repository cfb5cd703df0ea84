"""Transformers for drafting: weights from published files, a KV pool of fixed size, one decoder for heads and models.

No vLLM here. Everything runs on the CPU too, where the tests compare it with transformers.
"""
