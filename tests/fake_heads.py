"""EAGLE-3 heads with random weights, saved as each publisher does, and what they compute, by transformers' pieces.

The reference keeps no cache: every step computes all cells anew.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from specdec.channel.states import States
from specdec.draft.drafters import DraftSession

TARGET_LAYERS, VOCABULARY, DRAFTED, HIDDEN = 8, 120, 50, 64
LAYER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
}


class FakeTarget:
    """A tiny Llama with random weights. States are taken after `layers`, which a test may falsify."""

    def __init__(self, folder: Path, hidden: int, **more: Any) -> None:
        torch.manual_seed(7)
        sizes = LAYER | {"hidden_size": hidden, "num_hidden_layers": TARGET_LAYERS, "head_dim": hidden // 2}
        config = LlamaConfig(**(sizes | {"initializer_range": 0.15} | more))
        self.model = LlamaForCausalLM(config).eval()
        self.model.save_pretrained(folder, max_shard_size="50KB")  # several shards
        self.folder, self.hidden, self.layers = folder, hidden, (2, 4, 5)

    @torch.inference_mode()
    def states(self, tokens: Sequence[int]) -> torch.Tensor:  # [tokens, layers * hidden]
        came = self.model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
        return torch.cat([came[layer][0] for layer in self.layers], -1)

    def fed(self, tokens: Sequence[int], begin: int, end: int, dtype: torch.dtype = torch.float32) -> States:
        """What the verifier sends after a pass over tokens [begin, end)."""
        rows = self.states(tokens[:end])[begin:].to(dtype)
        raw = rows.view(torch.uint16) if dtype == torch.bfloat16 else rows
        array = raw.numpy()
        array.flags.writeable = False  # as a view of shared memory may be
        return States(begin, tuple(tokens[begin:end]), array, str(dtype).removeprefix("torch."))


class ReferenceHead(torch.nn.Module):
    """All cells at once, without a cache."""

    def __init__(self, target: FakeTarget, kind: str, own_embedding: bool = False, **norms: bool) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.norms, self.kind = norms, kind
        family, decoder = (Qwen3Config, Qwen3DecoderLayer) if kind == "qwen3" else (LlamaConfig, LlamaDecoderLayer)
        self.config = family(**LAYER, attention_bias=kind == "biased", attn_implementation="eager")
        self.config.num_hidden_layers = 2 if kind == "two layers" else 1
        self.layers = torch.nn.ModuleList(decoder(self.config, i) for i in range(self.config.num_hidden_layers))
        first = self.layers[0].self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(first, name)
            setattr(first, name, torch.nn.Linear(2 * HIDDEN, old.out_features, bias=old.bias is not None))
        self.layers[0].hidden_norm = LlamaRMSNorm(HIDDEN, 1e-5)
        self.norm = LlamaRMSNorm(HIDDEN, 1e-5)
        self.fc = torch.nn.Linear(3 * target.hidden, HIDDEN, bias=False)
        if norms.get("norm_before_fc"):
            self.input_norm = LlamaRMSNorm(3 * target.hidden, 1e-5)
        if norms.get("fc_norm"):
            self.fc_norm = torch.nn.ModuleList(LlamaRMSNorm(target.hidden, 1e-5) for _ in range(3))
        drafted = VOCABULARY if kind == "whole vocabulary" else DRAFTED
        self.lm_head = torch.nn.Linear(HIDDEN, drafted, bias=False)
        if own_embedding:
            self.embed_tokens = torch.nn.Embedding(VOCABULARY, HIDDEN)
        for name, parameter in self.named_parameters():
            # A small fc, or the feature would outweigh what the layer adds, and one draft be like another.
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.01 if name == "fc.weight" else 0.2)
        known = torch.randperm(VOCABULARY)[:drafted].sort().values
        self.register_buffer("d2t", known - torch.arange(drafted))
        self.register_buffer("t2d", torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, known, True))
        self._embedding = self.embed_tokens if own_embedding else target.model.model.embed_tokens
        self._rotary = LlamaRotaryEmbedding(self.config)
        self.eval()

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        if self.norms.get("norm_before_fc"):
            states = self.input_norm(states)
        if self.norms.get("fc_norm"):
            states = torch.cat([norm(x) for norm, x in zip(self.fc_norm, states.chunk(3, -1), strict=True)], -1)
        return self.fc(states)

    def forward(self, features: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(tokens)
        x, embedded = features[None], self._embedding(torch.tensor([list(tokens)]))
        angles = self._rotary(x, torch.arange(count)[None])
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        for i, layer in enumerate(self.layers):
            if i == 0:
                normed = layer.hidden_norm(x)
                residual = normed if self.norms.get("norm_before_residual") else x
                inside = torch.cat((layer.input_layernorm(embedded), normed), -1)
            else:
                residual, inside = x, layer.input_layernorm(x)
            x = residual + layer.self_attn(inside, position_embeddings=angles, attention_mask=mask)[0]
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        normed = self.norm(x)
        return normed[0], (normed if self.norms.get("norm_output") else x)[0]

    @torch.inference_mode()
    def features(self, target: FakeTarget, session: DraftSession, start: int = 0) -> torch.Tensor:  # [cells, hidden]
        """The feature at each true cell of a context that starts at `start`."""
        return self(self.fuse(target.states(session.tokens[:-1])[start:]), session.tokens[start + 1 :])[1]

    @torch.inference_mode()
    def is_greedy(self, target: FakeTarget, session: DraftSession, drafts: Sequence[int], start: int = 0) -> bool:
        """Whether each draft is the likeliest after those before it (to a rounding error of its logit)."""
        tokens = session.tokens[start + 1 :]
        features = self.fuse(target.states(session.tokens[:-1])[start:])
        for draft in drafts:
            normed, out = self(features, tokens)
            logits = self.lm_head(normed[-1])
            known = torch.arange(len(logits)) + self.d2t
            if draft not in known or logits.max() - logits[known == draft] > 1e-3:
                return False
            features, tokens = torch.cat((features, out[-1:])), [*tokens, draft]
        return True

    def save(self, folder: Path, published: str) -> Path:
        """Published as by `eagle` (its authors, SpecForge), `nvidia` or `speculators`."""
        names = {
            "eagle": lambda name: name.replace("layers.0.", "midlayer."),
            "nvidia": lambda name: name if name.startswith(("lm_head", "d2t", "t2d")) else f"model.{name}",
            "speculators": lambda name: name,
        }[published]
        tensors = {
            names(name): tensor.clone() for name, tensor in self.state_dict().items() if not name.startswith("_")
        }
        if self.kind == "whole vocabulary":
            del tensors["d2t"], tensors["t2d"]
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self._published(published)))
        return folder

    def _published(self, by: str) -> dict[str, Any]:
        layer = LAYER | {
            "model_type": self.config.model_type,
            "num_hidden_layers": len(self.layers),
            "hidden_act": "silu",
            "rope_theta": 10000.0,
            "rope_scaling": None,
        }
        more = {"draft_vocab_size": self.lm_head.out_features, "target_hidden_size": self.fc.in_features // 3}
        if by == "speculators":
            return {
                "architectures": ["Eagle3Speculator"],
                "speculators_model_type": "eagle3",
                "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "target"}},
                "transformer_layer_config": layer,
                "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
                "norm_before_residual": self.norms.get("norm_before_residual", False),
                **{name: on for name, on in self.norms.items() if on},
                **more,
            }
        flat = {"architectures": ["LlamaForCausalLMEagle3"], **layer, **more, **self.norms}
        if by == "nvidia":  # counts layers from 0
            flat["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
            flat["eagle_config"] |= {"use_last_layernorm": True, "use_input_layernorm_in_first_layer": True}
        return flat


def random_head(folder: Path, target: Path, layers: Sequence[int]) -> Path:
    """A head for any Llama of `target`'s shape, which guesses at random: what a stack may run, not what helps it."""
    its = json.loads((target / "config.json").read_text())
    hidden, inner, heads, kv_heads = (
        its[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    size = hidden // heads
    torch.manual_seed(5)
    shapes = {
        "fc": (hidden, len(layers) * hidden),
        "midlayer.self_attn.q_proj": (heads * size, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads * size, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads * size, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * size),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    }
    tensors = {f"{name}.weight": torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = torch.ones(hidden)
    tensors["norm.weight"] = torch.ones(hidden)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {**its, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": list(layers)}))
    return folder
