"""The head that comes with the demo model, as a file."""

import json

import pytest
import torch
from safetensors.torch import load_file

from specdec.heads import aux_layers_of, read_config
from specdec.model import demo_head
from specdec.stack import demo_draft

LAYERS, WIDTH, VOCABULARY = 30, 576, 49152  # SmolLM2-135M's


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return load_file(demo_head() / "model.safetensors")


def test_its_files_are_small_and_in_the_published_format(tensors):
    config = read_config(demo_head())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert aux_layers_of(config, LAYERS) == (2, 15, 27)  # EAGLE's own, so engines that are told none agree
    assert (config["target_hidden_size"], config["vocab_size"]) == (WIDTH, VOCABULARY)
    assert sum(file.stat().st_size for file in demo_head().iterdir()) <= 32e6
    assert {tensor.dtype for name, tensor in tensors.items() if name.endswith("weight")} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert tensors["fc.weight"].shape == (WIDTH, 3 * WIDTH)
    assert "Apache-2.0" in (demo_head() / "README.md").read_text()


def test_its_two_maps_of_the_vocabulary_agree(tensors):
    known = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    assert len(known) == json.loads((demo_head() / "config.json").read_text())["draft_vocab_size"]
    assert tensors["lm_head.weight"].shape == (len(known), WIDTH)
    assert known.tolist() == tensors["t2d"].nonzero().flatten().tolist()  # every id once, all below the target's size
    assert len(tensors["t2d"]) == VOCABULARY


@pytest.mark.parametrize(
    ("drafter", "demo", "wanted"),
    [
        ("", True, ("eagle3", str(demo_head()))),
        ("", False, ("ngram", None)),
        ("ngram", True, ("ngram", None)),
        ("eagle3", False, ("eagle3", None)),
    ],
)
def test_the_demo_models_draft_is_its_head_unless_another_is_asked_for(drafter, demo, wanted):
    assert demo_draft(drafter, None, demo=demo) == wanted
