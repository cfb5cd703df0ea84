"""An EAGLE-3 head (Li et al. 2025, arXiv 2503.01840): from a state of the target and the next token, the token after.

    state i [layers * target_hidden] ──fc──► feature i ──┐
    token i + 1 ──embedding──────────────────────────────┴─► layer (cell i) ──► feature ──norm, lm_head──► token i + 2

The feature that comes out stands in for the state that the target has not computed yet: with the drafted token's
embedding it is what the next cell is computed from.

Loaded as published by EAGLE's authors, SpecForge and NVIDIA (`LlamaForCausalLMEagle3`) and by speculators, and computed
as vLLM does (model_executor/models/llama_eagle3.py, qwen3_eagle3.py; transformers_utils/configs/speculators/algos.py).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig

from specdec.draft.model.decoder import Attention, Layer, Linear, Mlp, Pass, Rope, Shape, fused_for, ops_for, quantized
from specdec.draft.model.kv import KvPool
from specdec.draft.model.weights import Weights
from specdec.errors import CheckpointError
from specdec.heads import aux_layers_of, read_config, text_config

FAMILIES = ("llama", "qwen3")  # whose layer a head may be made of
ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Qwen3ForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "LlamaForCausalLM",  # so say the heads of EAGLE's authors
)
_EMBEDDINGS = tuple(f"{prefix}embed_tokens.weight" for prefix in ("model.", "language_model.model.", "")) + (
    "model.language_model.embed_tokens.weight",
)
_LM_HEADS = ("lm_head.weight", "language_model.lm_head.weight")


@dataclass(frozen=True)
class Norms:
    """Where heads differ. All false is EAGLE's own."""

    before_residual: bool  # the layer adds to the normed feature, not to the feature
    before_fc: bool  # one norm over the joined states
    each_state: bool  # a norm for each of the joined states
    output: bool  # the feature is the normed one

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Norms":
        eagle = config.get("eagle_config") or {}
        return cls(
            before_residual=config.get("norm_before_residual", "speculators_model_type" in config),
            before_fc=eagle.get("norm_before_fc", config.get("norm_before_fc", False)),
            each_state=config.get("fc_norm", False),
            output=config.get("norm_output", False),
        )


def layer_config(config: dict[str, Any]) -> Any:
    """A transformers config of the head's layer. Raises CheckpointError for what is no EAGLE-3 head."""
    if (kind := config.get("speculators_model_type")) is not None:
        if kind != "eagle3":
            raise CheckpointError(f"a speculator of type {kind}: only eagle3 is computed here")
        fields = dict(config.get("transformer_layer_config") or {})
    else:
        fields = dict(config)
        if unknown := [name for name in config.get("architectures") or () if name not in ARCHITECTURES]:
            raise CheckpointError(f"architecture {unknown[0]}: an EAGLE-3 head may be {', '.join(ARCHITECTURES)}")
    if config.get("quantization_config"):
        raise CheckpointError("a quantized head: only unquantized weights are computed here")
    family = fields.pop("model_type", "llama")
    if family not in FAMILIES:
        raise CheckpointError(f"model type {family}: an EAGLE-3 head may be one of {', '.join(FAMILIES)}")
    return AutoConfig.for_model(family, **fields)


def plain_name(name: str) -> str:
    """A tensor's name as speculators have it."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


class _FirstLayer:
    """The layer that reads an embedding beside the feature: its attention's input is twice as wide."""

    def __init__(self, shape: Shape, rope: Rope, weights: Weights, norms: Norms) -> None:
        self._eps, self._before_residual = shape.eps, norms.before_residual
        self._of_embedding = weights.take("layers.0.input_layernorm.weight")
        self._of_feature = weights.take("layers.0.hidden_norm.weight")
        self._before_mlp = weights.take("layers.0.post_attention_layernorm.weight")
        self._attention = Attention(shape, rope, weights, "layers.0.self_attn.")
        self._mlp = Mlp(weights, "layers.0.mlp.")

    def __call__(
        self, tokens: torch.Tensor, embedding: torch.Tensor, x: torch.Tensor, where: Pass, store: torch.Tensor
    ) -> torch.Tensor | None:  # [T], [vocab, hidden], features [T, hidden] -> what to add to x, unless it has been
        ops = ops_for(x.device)
        both = ops.join(
            *(tokens, embedding, x, self._of_embedding, self._of_feature, self._eps), keep=self._before_residual
        )
        if (gemv := fused_for(x, where)) is not None:
            self._attention.fused(gemv, both, None, where, store, onto=x)
            self._mlp.fused(gemv, x, self._before_mlp, self._eps)
            return None
        attended = self._attention(both, where, store)
        return self._mlp(ops.add_norm(x, attended, self._before_mlp, self._eps))


class Eagle3Head:
    """`folder` holds the head, `target` the model it was trained for, of which only the tensors a head lacks are read.

    Raises CheckpointError for a folder that is no EAGLE-3 head, or a head for another target.
    """

    def __init__(
        self, folder: Path, target: Path, device: torch.device, dtype: torch.dtype, *, float8: bool = False
    ) -> None:
        config, its = read_config(folder), text_config(read_config(target))
        weights = Weights(folder, device, dtype, float8=float8).renamed(plain_name)
        if "layers.0.hidden_norm.weight" not in weights:
            why = "an EAGLE-1 or EAGLE-2 head, which reads other states" if "fc.weight" in weights else "no EAGLE head"
            raise CheckpointError(f"{folder} holds {why}; an EAGLE-3 head is needed")
        of_layer = layer_config(config)
        self.shape = Shape(of_layer)
        self.aux_layers = aux_layers_of(config, its["num_hidden_layers"])
        self.layers: int = of_layer.num_hidden_layers
        self._norms, self._target_hidden = Norms.of(config), int(its["hidden_size"])
        self._check_width(weights)
        rope = Rope(of_layer, device)
        self._first = _FirstLayer(self.shape, rope, weights, self._norms)
        self._rest = [Layer(self.shape, rope, weights, f"layers.{i}.") for i in range(1, self.layers)]
        self._fc = weights.take("fc.weight")
        self._norm = weights.take("norm.weight")
        self._before_fc = weights.take("input_norm.weight") if self._norms.before_fc else None
        self._each_state = (
            [weights.take(f"fc_norm.{i}.weight") for i in range(len(self.aux_layers))] if self._norms.each_state else []
        )
        self._take_vocabulary(weights, target)

    @property
    def states(self) -> int:
        """Values of a token's states, those of all layers joined."""
        return len(self.aux_layers) * self._target_hidden

    @property
    def offsets(self) -> torch.Tensor | None:
        """[draft vocab] int64: what makes a drafted id the target's; None where they are the same."""
        return self._offsets

    def fuse(self, states: torch.Tensor) -> torch.Tensor:  # [T, layers * target_hidden] -> [T, hidden]
        """The features of tokens whose states the target has computed."""
        norm, eps = ops_for(states.device).add_norm, self.shape.eps
        if self._before_fc is not None:
            states = norm(states, None, self._before_fc, eps)
        if self._each_state:
            chunks = states.chunk(len(self.aux_layers), -1)
            normed = [norm(x.contiguous(), None, w, eps) for x, w in zip(chunks, self._each_state, strict=True)]
            states = torch.cat(normed, -1)
        return F.linear(states, self._fc)

    def __call__(
        self, tokens: torch.Tensor, features: torch.Tensor, where: Pass, pool: KvPool
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [T], [T, hidden] -> 2 x [T, hidden]
        """From each feature and the token after it: what `choose` takes, and the feature of that token.

        The features' memory is used for what comes out. Only device tensors, and no synchronisation: a step may be
        captured.
        """
        x = features
        delta = self._first(tokens, self._embedding, x, where, pool.store[0])
        for layer, store in zip(self._rest, pool.store[1:], strict=True):
            delta = layer(x, delta, where, store)
        normed = ops_for(x.device).add_norm(x, delta, self._norm, self.shape.eps)
        return normed, normed if self._norms.output else x

    def choose(self, normed: torch.Tensor) -> torch.Tensor:  # [n, hidden] -> [n] ids of the target
        """The likeliest tokens."""
        chosen = self._lm_head(normed).max(-1).indices  # argmax takes five times as long on a CPU
        return chosen if self._offsets is None else chosen + self._offsets[chosen]

    def best(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # [n, hidden] -> [n, candidates] twice
        """On CUDA: the highest logit of every block of the draft vocabulary, and its id there."""
        return self._lm_head.best(normed)

    def _check_width(self, weights: Weights) -> None:
        wanted = self.states
        hidden, width = weights.shape("fc.weight") if "fc.weight" in weights else (self.shape.hidden, 0)
        if (hidden, width) != (self.shape.hidden, wanted):
            raise CheckpointError(
                f"{weights.folder}: its fc turns {width} values into {hidden}, but {len(self.aux_layers)} states of "
                f"this target are {wanted} values, and the head's own width is {self.shape.hidden}"
            )

    def _take_vocabulary(self, weights: Weights, target: Path) -> None:
        def take(own: str, *of_target: str) -> torch.Tensor:
            tensor = weights.take(own) if own in weights else weights.like(target).take(*of_target)
            if tensor.shape[1] != self.shape.hidden:
                raise CheckpointError(
                    f"{weights.folder}: a head {self.shape.hidden} wide has no {own} of its own, and the target's is "
                    f"{tensor.shape[1]} wide"
                )
            return tensor

        self._embedding = take("embed_tokens.weight", *_EMBEDDINGS)  # [vocab, hidden]
        lm_head = take("lm_head.weight", *_LM_HEADS, *_EMBEDDINGS)  # [draft vocab, hidden]
        self._lm_head = quantized(lm_head) if weights.float8 else Linear(lm_head)
        self._offsets: torch.Tensor | None = None  # [draft vocab] int64: to the target's ids
        drafted, known = len(lm_head), len(self._embedding)
        self.last_id = known - 1  # of its own a head may have fewer than its target
        if drafted != known:
            self._offsets = weights.take("d2t")
            if len(self._offsets) != drafted:
                raise CheckpointError(
                    f"{weights.folder}: its LM head has {drafted} tokens, its d2t {len(self._offsets)}"
                )
