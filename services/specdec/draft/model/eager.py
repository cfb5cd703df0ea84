"""The kernels' functions (kernels.py) in plain torch: the draft on a CPU, and what the kernels are compared with."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

# NOTE: cuDNN's attention, which torch prefers on Hopper, takes 30 ms to plan for every length it has not seen.
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Span(Protocol):
    """Consecutive tokens of one session; see decoder.Span."""

    @property
    def first(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def count(self) -> int: ...


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:  # [..., n]
    """Root mean square norm, in float32 as the families compute it (Zhang & Sennrich 2019)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x += delta in place, and the norm of that. [T, n]"""
    if delta is not None:
        x += delta
    return _norm(x, weight, eps)


def join(
    tokens: torch.Tensor,
    table: torch.Tensor,
    features: torch.Tensor,
    of_token: torch.Tensor,
    of_feature: torch.Tensor,
    eps: float,
    keep: bool,
) -> torch.Tensor:  # [T], [vocab, n], [T, n] -> [T, 2n]
    """The norms of each token's row of `table` and of its feature. With `keep` the latter replaces the feature too."""
    normed = _norm(features, of_feature, eps)
    if keep:
        features.copy_(normed)
    return torch.cat((_norm(F.embedding(tokens, table), of_token, eps), normed), -1)


def gate(gate_up: torch.Tensor) -> torch.Tensor:  # [T, 2n] -> [T, n]
    """silu(gate) * up of the two halves."""
    gates, up = gate_up.chunk(2, -1)
    return F.silu(gates) * up


def rope_store(
    qkv: torch.Tensor,
    heads: int,
    frequencies: torch.Tensor,
    factor: float,
    positions: torch.Tensor,
    cells: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    store: torch.Tensor,
) -> torch.Tensor:  # -> q [T, heads, head_size]
    """Norms where the family has them, rotation, and keys and values into their cells.

    qkv [T, (heads + 2 kv_heads) * head_size], store [2, cells, kv_heads, head_size].
    """
    kv_heads, size = store.shape[2:]
    q, k, v = qkv.view(len(qkv), -1, size).split((heads, kv_heads, kv_heads), 1)
    if norms is not None:
        q, k = _norm(q, norms[0], eps), _norm(k, norms[1], eps)
    angles = positions[:, None, None].float() * frequencies  # [T, 1, head_size / 2]
    cos, sin = (angles.cos() * factor).to(qkv.dtype), (angles.sin() * factor).to(qkv.dtype)
    store[0].index_copy_(0, cells, _rotate(k, cos, sin))
    store[1].index_copy_(0, cells, v)
    return _rotate(q, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:  # [T, heads, head_size]
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def attend(
    q: torch.Tensor, store: torch.Tensor, positions: torch.Tensor, firsts: torch.Tensor, together: int = 1
) -> torch.Tensor:  # [T, heads, head_size] -> [T, heads * head_size]
    """Attention of every token over its run's cells up to its own position."""
    parts = []
    for query, position, first in zip(q, positions.tolist(), firsts.tolist(), strict=True):
        k, v = store[:, first : first + position + 1].transpose(1, 2)[:, None]
        parts.append(F.scaled_dot_product_attention(query[None, :, None], k, v, enable_gqa=True)[0, :, 0])
    return torch.stack(parts).flatten(1)


def attend_spans(q: torch.Tensor, store: torch.Tensor, spans: Iterable[Span]) -> torch.Tensor:
    """The same for tokens of which each session has several: [T, heads, head_size] -> [T, heads * head_size]."""
    parts, at = [], 0
    with sdpa_kernel(_BACKENDS) if q.is_cuda else nullcontext():
        for span in spans:
            length = span.position + span.count
            run = store[:, span.first : span.first + length]
            k, v = run.transpose(1, 2)[:, None]  # [1, kv_heads, length, head_size]
            query = q[at : at + span.count]
            at += span.count
            if span.count == 1 and not q.is_cuda:
                parts.append(_attend_one(query[0], k, v)[None])
                continue
            mask = _causal(span, q.device) if span.count > 1 else None
            mixed = F.scaled_dot_product_attention(query.transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=True)
            parts.append(mixed[0].transpose(0, 1))
    return torch.cat(parts).flatten(1)


def _attend_one(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One token's attention, [heads, head_size], over all of k and v, 2 x [1, kv_heads, length, head_size]: heads that
    share keys are like so many tokens. On a CPU that takes a third of the time that enable_gqa does."""
    grouped = query.view(1, k.shape[1], -1, query.shape[-1])
    return F.scaled_dot_product_attention(grouped, k, v).view_as(query)


def _causal(span: Span, device: torch.device) -> Any:
    """Which keys each token of a span attends to: those up to its own. On CUDA not written out, for flash attention."""
    length = span.position + span.count
    if device.type == "cuda":
        return causal_lower_right(span.count, length)
    ages = torch.arange(length, device=device)
    return ages[None] <= ages[span.position :, None]
