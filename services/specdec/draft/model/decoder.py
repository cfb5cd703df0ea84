"""A Llama-shaped decoder over the KV pool: Llama, Qwen2 and Qwen3 models, and the one layer of an EAGLE-3 head.

A pass computes T tokens of any number of sessions. Each knows its position and the first cell of its session's run; its
keys and values are written to cell first + position, and it attends to the cells from `first` up to its own. So feeding
a position again simply overwrites it, and a rejected draft needs no undoing.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specdec.draft.model.kv import KvPool
from specdec.draft.model.weights import Weights
from specdec.errors import CheckpointError

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


@dataclass(frozen=True)
class Span:
    """`count` tokens of one session, from `position` on; its run starts at cell `first`."""

    first: int
    position: int
    count: int


@dataclass(frozen=True)
class Pass:
    """Where the tokens of one forward pass stand."""

    positions: torch.Tensor  # [T] int64
    cells: torch.Tensor  # [T] int64: where each token's keys and values go
    spans: tuple[Span, ...]  # the same, session by session

    @classmethod
    def of(cls, spans: list[Span], device: torch.device) -> "Pass":
        positions = [span.position + i for span in spans for i in range(span.count)]
        cells = [span.first + span.position + i for span in spans for i in range(span.count)]
        both = torch.tensor([positions, cells], dtype=torch.int64).to(device, non_blocking=True)
        return cls(both[0], both[1], tuple(spans))


class Shape:
    """What of a transformers config a decoder layer needs. Raises CheckpointError for a layer that works otherwise."""

    def __init__(self, config: Any) -> None:
        self.hidden: int = config.hidden_size
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or self.heads
        self.head_size: int = getattr(config, "head_dim", None) or self.hidden // self.heads
        self.eps: float = config.rms_norm_eps
        self.context: int = config.max_position_embeddings
        if config.hidden_act != "silu":
            raise CheckpointError(f"hidden_act {config.hidden_act}: only silu is computed here")
        window = getattr(config, "sliding_window", None)
        if window and getattr(config, "use_sliding_window", True):
            self.context = min(self.context, window)  # within the window a sliding layer attends to everything


class Rope:
    """Rotary embeddings of a transformers config, every scaling that library knows (Su et al. 2021)."""

    def __init__(self, config: Any, device: torch.device, dtype: torch.dtype) -> None:
        kind = config.rope_parameters.get("rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise CheckpointError(f"rope type {kind} depends on the text's length, and a KV cache cannot follow that")
        if kind == "default":
            size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
            frequencies, factor = 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0
        else:
            frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        self._frequencies = frequencies.to(device)
        self._factor, self._dtype = factor, dtype

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # [T] -> 2 x [T, 1, head_size]
        angles = positions[:, None].float() * self._frequencies
        angles = torch.cat((angles, angles), -1)[:, None]
        return (angles.cos() * self._factor).to(self._dtype), (angles.sin() * self._factor).to(self._dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:  # [T, heads, head_size]
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:  # [..., n]
    """Root mean square norm, in float32 as the families compute it (Zhang & Sennrich 2019)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def attend(q: torch.Tensor, store: torch.Tensor, spans: tuple[Span, ...]) -> torch.Tensor:
    """Causal attention of every span over its run. q [T, heads, head_size], store [2, cells, kv_heads, head_size]."""
    parts, at = [], 0
    for span in spans:
        end = span.first + span.position + span.count
        k, v = store[:, span.first : end].transpose(1, 2)[:, None]  # [1, kv_heads, length, head_size]
        mask = None
        if span.count > 1:
            ages = torch.arange(span.position + span.count, device=q.device)
            mask = ages[None] <= ages[span.position :, None]
        part = F.scaled_dot_product_attention(
            q[at : at + span.count].transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=True
        )
        parts.append(part[0].transpose(0, 1))
        at += span.count
    return torch.cat(parts)


@dataclass(frozen=True)
class _Linear:
    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


def _linear(weights: Weights, prefix: str, *names: str) -> _Linear:
    """Several projections of the same input as one."""
    bias = None
    if f"{prefix}{names[0]}.bias" in weights:
        bias = torch.cat([weights.take(f"{prefix}{name}.bias") for name in names])
    return _Linear(torch.cat([weights.take(f"{prefix}{name}.weight") for name in names]), bias)


class Attention:
    """Self-attention with grouped key-value heads. Its input may be wider than the model (an EAGLE-3 head's is)."""

    def __init__(self, shape: Shape, weights: Weights, prefix: str) -> None:
        self._shape = shape
        self._qkv = _linear(weights, prefix, "q_proj", "k_proj", "v_proj")
        self._o = _linear(weights, prefix, "o_proj")
        self._norms: tuple[torch.Tensor, torch.Tensor] | None = None
        if f"{prefix}q_norm.weight" in weights:  # Qwen3
            self._norms = weights.take(f"{prefix}q_norm.weight"), weights.take(f"{prefix}k_norm.weight")

    def __call__(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], where: Pass, store: torch.Tensor
    ) -> torch.Tensor:  # [T, in] -> [T, hidden]
        s = self._shape
        q, k, v = self._qkv(x).view(len(x), -1, s.head_size).split((s.heads, s.kv_heads, s.kv_heads), 1)
        if self._norms is not None:
            q, k = norm(q, self._norms[0], s.eps), norm(k, self._norms[1], s.eps)
        store[0].index_copy_(0, where.cells, rotate(k, *rope))
        store[1].index_copy_(0, where.cells, v)
        return self._o(attend(rotate(q, *rope), store, where.spans).reshape(len(x), -1))


class Mlp:
    """The gated feed-forward block."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._gate_up = _linear(weights, prefix, "gate_proj", "up_proj")
        self._down = _linear(weights, prefix, "down_proj")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [T, hidden] -> [T, hidden]
        gate, up = self._gate_up(x).chunk(2, -1)
        return self._down(F.silu(gate) * up)


class Layer:
    """One block, norms before its two halves."""

    def __init__(self, shape: Shape, weights: Weights, prefix: str) -> None:
        self._eps = shape.eps
        self._before_attention = weights.take(f"{prefix}input_layernorm.weight")
        self._before_mlp = weights.take(f"{prefix}post_attention_layernorm.weight")
        self._attention = Attention(shape, weights, f"{prefix}self_attn.")
        self._mlp = Mlp(weights, f"{prefix}mlp.")

    def __call__(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], where: Pass, store: torch.Tensor
    ) -> torch.Tensor:  # [T, hidden] -> [T, hidden]
        x = x + self._attention(norm(x, self._before_attention, self._eps), rope, where, store)
        return x + self._mlp(norm(x, self._before_mlp, self._eps))


class CausalModel:
    """A whole model: token ids in, logits out."""

    def __init__(self, config: Any, weights: Weights) -> None:
        if config.model_type not in FAMILIES:
            raise CheckpointError(f"model type {config.model_type}: a draft may be one of {', '.join(FAMILIES)}")
        self.shape = Shape(config)
        self.layers = [Layer(self.shape, weights, f"model.layers.{i}.") for i in range(config.num_hidden_layers)]
        self._rope = Rope(config, weights.device, weights.dtype)
        self._embedding = weights.take("model.embed_tokens.weight")  # [vocab, hidden]
        self._norm = weights.take("model.norm.weight")
        tied = config.tie_word_embeddings or "lm_head.weight" not in weights
        self._head = self._embedding if tied else weights.take("lm_head.weight")

    def hidden(self, tokens: torch.Tensor, where: Pass, pool: KvPool) -> torch.Tensor:  # [T] -> [T, hidden]
        x = F.embedding(tokens, self._embedding)
        rope = self._rope.at(where.positions)
        for layer, store in zip(self.layers, pool.store, strict=True):
            x = layer(x, rope, where, store)
        return norm(x, self._norm, self.shape.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:  # [n, hidden] -> [n, vocab]
        return F.linear(hidden, self._head)
