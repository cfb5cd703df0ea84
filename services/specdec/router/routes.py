"""Which of vLLM's routes the public port has. The rest is for operators, at the pair's own address."""

import re

_BESIDE_V1 = frozenset(
    ("/tokenize", "/detokenize", "/version", "/pooling", "/classify", "/score", "/rerank", "/v2/rerank")
)
_NOT_OF_V1 = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"))
# POST, and yet no work worth a place: a table look-up, and what ends work, which must not wait behind it.
_CHEAP = re.compile(r"/detokenize|/v1/responses/[^/]+/cancel")


def public(path: str) -> bool:
    """Whether the public port passes `path` on."""
    if not {".", ".."}.isdisjoint(path.split("/")):  # whatever is in front of vLLM may resolve them
        return False
    return (path.startswith("/v1/") and path.rstrip("/") not in _NOT_OF_V1) or path in _BESIDE_V1


def queued(method: str, path: str) -> bool:
    """Whether a request may make the engine compute, so that it takes a place of admission: every POST, also of routes
    that vLLM has yet to get, but those known to be cheap."""
    return method == "POST" and not _CHEAP.fullmatch(path)
