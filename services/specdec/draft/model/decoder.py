"""A Llama-shaped decoder over the KV pool: Llama, Qwen2 and Qwen3 models, and the one layer of an EAGLE-3 head.

A pass computes T tokens of any number of sessions. Each knows its position and the first cell of its session's run; its
keys and values are written to cell first + position, and it attends to the cells from `first` up to its own. So feeding
a position again simply overwrites it, and a rejected draft needs no undoing.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specdec.draft.model import eager
from specdec.draft.model.kv import KvPool
from specdec.draft.model.weights import Weights
from specdec.errors import CheckpointError


def ops_for(device: torch.device) -> Any:
    """What lies between the matrix products: kernels on CUDA, plain torch elsewhere; the same functions in both."""
    if device.type != "cuda":
        return eager
    from specdec.draft.model import kernels  # NOTE: Triton comes with torch's CUDA build only

    return kernels


def fused_for(x: torch.Tensor, where: "Pass") -> Any:
    """The matrix products' own kernels, for a captured pass of a few tokens on CUDA; otherwise None."""
    if where.spans is not None or x.device.type != "cuda":
        return None
    from specdec.draft.model import gemv

    return gemv if len(x) <= gemv.MOST_TOKENS else None


FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


@dataclass(frozen=True)
class Span:
    """`count` tokens of one session, from `position` on; its run starts at cell `first`."""

    first: int
    position: int
    count: int


@dataclass(frozen=True)
class Pass:
    """Where the tokens of one forward pass stand. Without spans only the device knows: a captured graph's pass."""

    positions: torch.Tensor  # [T] int64
    firsts: torch.Tensor  # [T] int64: the first cell of each token's run
    spans: tuple[Span, ...] | None = None  # the same, session by session
    together: int = 1  # without spans: tokens every session has, one after the other

    @cached_property
    def cells(self) -> torch.Tensor:  # [T] int64: where each token's keys and values go
        return self.firsts + self.positions

    @classmethod
    def of(cls, spans: list[Span], device: torch.device) -> "Pass":
        positions = [span.position + i for span in spans for i in range(span.count)]
        firsts = [span.first for span in spans for _ in range(span.count)]
        both = torch.tensor([positions, firsts], dtype=torch.int64).to(device)
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

    def __init__(self, config: Any, device: torch.device) -> None:
        kind = config.rope_parameters.get("rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise CheckpointError(f"rope type {kind} depends on the text's length, and a KV cache cannot follow that")
        if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
            raise CheckpointError(f"rope type {kind} is not computed here")
        if kind == "default":
            size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
            frequencies, self.factor = 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0
        else:
            frequencies, self.factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        self.frequencies = frequencies.to(device)  # [head_size / 2] float32


@dataclass(frozen=True)
class Linear:
    """A linear map; on CUDA the LM head is asked only for its highest outputs."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None = None
    float8: torch.Tensor | None = None  # the weights over their scales, for passes of a few tokens
    scale: torch.Tensor | None = None  # [out] float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    @property
    def narrow(self) -> torch.Tensor:
        """The weights in as few bytes as they are held in."""
        return self.weight if self.float8 is None else self.float8

    def best(self, x: torch.Tensor, ranks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:  # -> [T, candidates] twice
        """On CUDA: the `ranks` highest outputs of every block of them, and their numbers."""
        from specdec.draft.model import gemv, kernels

        if len(x) > gemv.MOST_TOKENS:
            return kernels.maxima(self(x), ranks)
        if ranks == 1:
            return gemv.head(x, self.narrow, self.scale)
        return kernels.maxima(gemv.project(x, self.narrow, scale=self.scale, dtype=torch.float32), ranks)


def _linear(weights: Weights, prefix: str, *names: str) -> Linear:
    """Several projections of the same input as one."""
    bias = None
    if f"{prefix}{names[0]}.bias" in weights:
        bias = torch.cat([weights.take(f"{prefix}{name}.bias") for name in names])
    weight = torch.cat([weights.take(f"{prefix}{name}.weight") for name in names])
    return quantized(weight, bias) if weights.float8 else Linear(weight, bias)


def quantized(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Weights rounded to float8 (e4m3), with a scale for each output so that its largest is the largest of the type."""
    scale = weight.abs().amax(1).float().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    float8 = (weight.float() / scale[:, None]).to(torch.float8_e4m3fn)
    return Linear((float8.float() * scale[:, None]).to(weight.dtype), bias, float8, scale)


def _fused_linear(gemv: Any, linear: Linear, x: torch.Tensor, **around: Any) -> torch.Tensor:
    return gemv.project(x, linear.narrow, scale=linear.scale, bias=linear.bias, **around)


class Attention:
    """Self-attention with grouped key-value heads. Its input may be wider than the model (an EAGLE-3 head's is)."""

    def __init__(self, shape: Shape, rope: Rope, weights: Weights, prefix: str) -> None:
        self._shape, self._rope = shape, rope
        self._qkv = _linear(weights, prefix, "q_proj", "k_proj", "v_proj")
        self._o = _linear(weights, prefix, "o_proj")
        self._norms: tuple[torch.Tensor, torch.Tensor] | None = None
        if f"{prefix}q_norm.weight" in weights:  # Qwen3
            self._norms = weights.take(f"{prefix}q_norm.weight"), weights.take(f"{prefix}k_norm.weight")

    def __call__(self, x: torch.Tensor, where: Pass, store: torch.Tensor) -> torch.Tensor:  # [T, in] -> [T, hidden]
        ops, shape, rope = ops_for(x.device), self._shape, self._rope
        q = ops.rope_store(
            *(self._qkv(x), shape.heads, rope.frequencies, rope.factor, where.positions, where.cells),
            *(self._norms, shape.eps, store),
        )
        if where.spans is None:
            return self._o(ops.attend(q, store, where.positions, where.firsts, where.together))
        return self._o(eager.attend_spans(q, store, where.spans))

    def fused(
        self,
        gemv: Any,
        x: torch.Tensor,
        norm: torch.Tensor | None,
        where: Pass,
        store: torch.Tensor,
        onto: torch.Tensor,
    ) -> None:
        """Adds to `onto` [T, hidden] what x [T, in] gives, or the norm of it."""
        ops, shape, rope, eps = ops_for(x.device), self._shape, self._rope, self._shape.eps
        turn = rope.frequencies, rope.factor, where.positions, where.cells
        if self._norms is None:
            q = gemv.qkv(x, norm, eps, self._qkv.narrow, self._qkv.bias, *turn, store, self._qkv.scale)
        else:
            projected = _fused_linear(gemv, self._qkv, x, norm=norm, eps=eps)
            q = ops.rope_store(projected, shape.heads, *turn, self._norms, eps, store)
        mixed = ops.attend(q, store, where.positions, where.firsts, where.together)
        _fused_linear(gemv, self._o, mixed, onto=onto)


class Mlp:
    """The gated feed-forward block."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._gate_up = _linear(weights, prefix, "gate_proj", "up_proj")
        self._down = _linear(weights, prefix, "down_proj")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [T, hidden] -> [T, hidden]
        return self._down(ops_for(x.device).gate(self._gate_up(x)))

    def fused(self, gemv: Any, x: torch.Tensor, norm: torch.Tensor, eps: float) -> None:
        """Adds to x [T, hidden] what the norm of it gives."""
        if self._gate_up.bias is None:
            gated = gemv.gate_up(x, norm, eps, self._gate_up.narrow, self._gate_up.scale)
        else:
            gated = ops_for(x.device).gate(_fused_linear(gemv, self._gate_up, x, norm=norm, eps=eps))
        _fused_linear(gemv, self._down, gated, onto=x)


class Layer:
    """One block, norms before its two halves. What the block before it gave is added first, with the norm."""

    def __init__(self, shape: Shape, rope: Rope, weights: Weights, prefix: str) -> None:
        self._eps = shape.eps
        self._before_attention = weights.take(f"{prefix}input_layernorm.weight")
        self._before_mlp = weights.take(f"{prefix}post_attention_layernorm.weight")
        self._attention = Attention(shape, rope, weights, f"{prefix}self_attn.")
        self._mlp = Mlp(weights, f"{prefix}mlp.")

    def __call__(
        self, x: torch.Tensor, delta: torch.Tensor | None, where: Pass, store: torch.Tensor
    ) -> torch.Tensor | None:  # [T, hidden] -> what to add to x, unless it has been
        if delta is None and (gemv := fused_for(x, where)) is not None:
            self._attention.fused(gemv, x, self._before_attention, where, store, onto=x)
            self._mlp.fused(gemv, x, self._before_mlp, self._eps)
            return None
        ops = ops_for(x.device)
        attended = self._attention(ops.add_norm(x, delta, self._before_attention, self._eps), where, store)
        return self._mlp(ops.add_norm(x, attended, self._before_mlp, self._eps))


class CausalModel:
    """A whole model: token ids in, logits out."""

    def __init__(self, config: Any, weights: Weights) -> None:
        if config.model_type not in FAMILIES:
            raise CheckpointError(f"model type {config.model_type}: a draft may be one of {', '.join(FAMILIES)}")
        self.shape = Shape(config)
        rope = Rope(config, weights.device)
        self.layers = [Layer(self.shape, rope, weights, f"model.layers.{i}.") for i in range(config.num_hidden_layers)]
        self._embedding = weights.take("model.embed_tokens.weight")  # [vocab, hidden]
        self.last_id = len(self._embedding) - 1  # a target may know more: padding, an image's placeholder
        self._norm = weights.take("model.norm.weight")
        tied = config.tie_word_embeddings or "lm_head.weight" not in weights
        head = self._embedding if tied else weights.take("lm_head.weight")
        self._head = quantized(head) if weights.float8 else Linear(head)

    def hidden(self, tokens: torch.Tensor, where: Pass, pool: KvPool) -> torch.Tensor:  # [T] -> [T, hidden]
        x, delta = F.embedding(tokens, self._embedding), None
        for layer, store in zip(self.layers, pool.store, strict=True):
            delta = layer(x, delta, where, store)
        return ops_for(x.device).add_norm(x, delta, self._norm, self.shape.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:  # [n, hidden] -> [n, vocab]
        return self._head(hidden)

    def best(self, hidden: torch.Tensor, ranks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """On CUDA, for [n, hidden]: the highest logits of every block of the vocabulary, and their ids."""
        return self._head.best(hidden, ranks)
