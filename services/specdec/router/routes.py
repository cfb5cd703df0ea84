"""Which of vLLM's routes the public port has. The rest is for operators, at the pair's own address."""

from specdec.router.limits import CHAT, COMPLETIONS

_BESIDE_V1 = frozenset(
    ("/tokenize", "/detokenize", "/version", "/pooling", "/classify", "/score", "/rerank", "/v2/rerank")
)
_NOT_OF_V1 = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"))
_QUEUED = (CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score", "/v1/rerank")
_QUEUED_BESIDE_V1 = ("/pooling", "/classify", "/score", "/rerank", "/v2/rerank", "/v1/chat/completions/batch")


def public(path: str) -> bool:
    """Whether the public port passes `path` on."""
    return (path.startswith("/v1/") and path.rstrip("/") not in _NOT_OF_V1) or path in _BESIDE_V1


def queued(method: str, path: str) -> bool:
    """Whether a request makes the engine compute, so that it takes a place of admission."""
    return method == "POST" and (path in _QUEUED or path in _QUEUED_BESIDE_V1)
