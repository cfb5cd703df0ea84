"""Load tests for any server of the OpenAI API: `locust -f loadtest/` and `python -m loadtest ab`.

Locust loads every file here whose name has no leading underscore, so there is one: locustfile.py. Nothing but that and
_locust.py needs locust, and nothing here needs specdec.
"""
