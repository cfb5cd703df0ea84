"""draft/model/decoder.py: linear maps whose weights are rounded to 8 bits."""

import torch
from transformers import AutoConfig

from specdec.draft.bench import SHAPES, write_random
from specdec.draft.model.decoder import CausalModel, quantized
from specdec.draft.model.weights import Weights


def test_each_outputs_weights_are_within_a_step_of_their_own_scale():
    torch.manual_seed(1)
    weight = torch.randn(40, 64) * torch.logspace(-3, 3, 40)[:, None]
    weight[7] = 0
    linear = quantized(weight)
    assert torch.equal(linear.narrow.float() * linear.scale[:, None], linear.weight)
    largest = weight.abs().amax(1, keepdim=True)
    step = torch.maximum(weight.abs() / 16, largest / 448 / 1024)  # 3 bits after the first; below 2^-6, 2^-10
    assert bool(((linear.weight - weight).abs() <= step * 1.0001).all())
    assert not torch.equal(linear.weight, weight)


def test_all_linear_maps_are_rounded_and_the_embedding_is_not(tmp_path):
    write_random(tmp_path, SHAPES["tiny"], torch.device("cpu"))
    config, device = AutoConfig.from_pretrained(tmp_path), torch.device("cpu")
    plain = CausalModel(config, Weights(tmp_path, device, torch.bfloat16))
    rounded = CausalModel(config, Weights(tmp_path, device, torch.bfloat16, float8=True))
    assert torch.equal(plain._embedding, rounded._embedding)
    maps = [(plain._head, rounded._head)]
    for ours, theirs in zip(rounded.layers, plain.layers, strict=True):
        maps += [(theirs._attention._qkv, ours._attention._qkv), (theirs._attention._o, ours._attention._o)]
        maps += [(theirs._mlp._gate_up, ours._mlp._gate_up), (theirs._mlp._down, ours._mlp._down)]
    for before, after in maps:
        assert before.narrow.dtype == torch.bfloat16
        assert after.narrow.dtype == torch.float8_e4m3fn
        error = (after.weight.float() - before.weight.float()).norm() / before.weight.float().norm()
        assert 0.005 < error < 0.05
