"""What an EAGLE-3 head's folder says about itself, read without torch: the verifier asks too.

A head reads the target's hidden states after some of its layers. Here an id L means after L layers, as vLLM counts for
`set_aux_hidden_state_layers` (model_executor/models/interfaces.py: 0 is the embeddings, idx + 1 follows layer idx) and
transformers for `hidden_states[L]`. What checkpoints mean by an id:

- None given: EAGLE's own layers 2, n // 2 and n - 3 of n. EAGLE collects before layer idx (eagle/model/
  modeling_llama_kv.py), which is after idx layers; vLLM's get_eagle3_default_aux_hidden_state_layers are the same.
- speculators: its training data comes from vLLM, and the ids are vLLM's.
- `eagle_config` or top level: vLLM takes them as they are (gpu_model_runner.py, _get_eagle3_aux_layers_from_config).
- Ids that begin with 1: SpecForge (eagle3_target_model.py) and NVIDIA's Model Optimizer (hf_eagle.py) hook the output
  of layer idx, counted from 0, by default 1, n // 2 - 1 and n - 4; their ids are one less than ours. Converters copy
  them. SGLang tells the two apart by the first id (sgl-project/sglang#25454), and so is it done here. NOTE: vLLM does
  not, so such a head is given other layers there.

Engines hand the states over in the order of the layers, whatever the order of the ids.
"""

import json
from pathlib import Path
from typing import Any

from specdec.errors import CheckpointError


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises CheckpointError if there is none."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} is no model folder: it has no config.json")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds no settings")
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a target's config; a model that also sees or hears nests it."""
    for name in ("text_config", "llm_config"):
        if isinstance(nested := config.get(name), dict):
            return nested
    return config


def aux_layers_of(config: dict[str, Any], target_layers: int) -> tuple[int, ...]:
    """After how many of the target's layers the head reads its hidden states, ascending.

    `config`: the head's. Raises CheckpointError if the target has no such layer, or if the head reads none.
    """
    eagle = config.get("eagle_config") or {}
    if not eagle.get("use_aux_hidden_state", True):
        raise CheckpointError("the head reads the target's last, normed state (use_aux_hidden_state is false)")
    given = config.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    layers = sorted(given or (2, target_layers // 2, target_layers - 3))
    if given and layers[0] == 1 and layers[-1] < target_layers and "speculators_model_type" not in config:
        layers = [layer + 1 for layer in layers]
    if wrong := [layer for layer in layers if not 0 <= layer <= target_layers]:
        raise CheckpointError(f"the head reads the state after layer {wrong[0]} of a target of {target_layers} layers")
    if len(set(layers)) < len(layers):
        raise CheckpointError(f"the head reads a layer twice: {', '.join(map(str, layers))}")
    return tuple(layers)
