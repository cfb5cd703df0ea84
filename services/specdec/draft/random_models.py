"""Models with random weights in the shapes of real ones, as folders: for timing, which does not ask what they say."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config


@dataclass(frozen=True)
class HeadShape:
    """An EAGLE-3 head beside the target it is for."""

    layer: dict[str, Any]  # as a head's config.json has it
    target_layers: int

    @property
    def hidden(self) -> int:
        return int(self.layer["hidden_size"])


SHAPES: dict[str, PretrainedConfig] = {
    "1b": LlamaConfig(  # Llama-3.2-1B's
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    ),
    "0.6b": Qwen3Config(  # Qwen3-0.6B's
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
    "tiny": LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    ),
}
HEADS = {
    "eagle3-8b": HeadShape(  # EAGLE3-LLaMA3.1-Instruct-8B's
        {
            "vocab_size": 128256,
            "draft_vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
        },
        target_layers=32,
    ),
    "eagle3-tiny": HeadShape(
        {
            "vocab_size": 256,
            "draft_vocab_size": 100,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 1024,
        },
        target_layers=8,
    ),
}


def write_random(folder: Path, config: PretrainedConfig, device: torch.device) -> None:
    """A model folder with random weights in bfloat16."""
    with torch.device("meta"):
        tensors = AutoModelForCausalLM.from_config(config).state_dict()
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in tensors.items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    _save(folder, shapes, {}, device)
    config.save_pretrained(folder)


def write_random_head(folder: Path, target: Path, shape: HeadShape, device: torch.device) -> None:
    """An EAGLE-3 head with random weights in bfloat16, and of its target what a head reads: config and embedding."""
    sizes, hidden = shape.layer, shape.hidden
    head_size, mlp, drafted = sizes["head_dim"], sizes["intermediate_size"], sizes["draft_vocab_size"]
    q, kv = sizes["num_attention_heads"] * head_size, sizes["num_key_value_heads"] * head_size
    matrices = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (drafted, hidden),
        "midlayer.self_attn.q_proj": (q, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, q),
        "midlayer.mlp.gate_proj": (mlp, hidden),
        "midlayer.mlp.up_proj": (mlp, hidden),
        "midlayer.mlp.down_proj": (hidden, mlp),
    }
    norms = ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm")
    shapes = {f"{name}.weight": size for name, size in (matrices | dict.fromkeys(norms, (hidden,))).items()}
    spread = torch.arange(drafted) * (sizes["vocab_size"] // drafted - 1)  # the draft's tokens lie evenly among all
    for one in (folder, target):
        one.mkdir(parents=True, exist_ok=True)
    _save(folder, shapes, {"d2t": spread}, device)
    config = sizes | {"hidden_act": "silu", "rms_norm_eps": 1e-5, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"], **config}))
    _save(target, {"model.embed_tokens.weight": (sizes["vocab_size"], hidden)}, {}, device)
    its = LlamaConfig(**(sizes | {"num_hidden_layers": shape.target_layers}))
    its.save_pretrained(target)


def _save(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], more: dict[str, torch.Tensor], device: torch.device
) -> None:
    torch.manual_seed(0)
    made = {
        name: torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(0.02).cpu() for name, shape in shapes.items()
    }
    save_file(made | more, folder / "model.safetensors")
