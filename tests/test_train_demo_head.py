"""tools/train_demo_head: what it trains is what the draft computes."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fake_heads import VOCABULARY, FakeTarget
from specdec.draft.drafters import DraftSession
from specdec.draft.drafters.eagle3 import Eagle3Drafter

TOOL = Path(__file__).parent.parent / "tools" / "train_demo_head"
LAYERS, STEPS = (2, 4, 5), 3


@pytest.fixture(scope="module")
def train():
    sys.path.insert(0, str(TOOL))
    try:
        import train

        yield train
    finally:
        sys.path.remove(str(TOOL))
        for name in ("train", "head", "conversations"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def trained(train, tmp_path_factory) -> tuple[FakeTarget, Path]:
    """A target, and a head trained for it for half a second."""
    folder = tmp_path_factory.mktemp("train")
    target = FakeTarget(folder / "target", 64)
    from conversations import Conversation, save

    random = np.random.default_rng(3)
    talk = [random.integers(0, 60, size).tolist() for size in random.integers(20, 90, 24)]
    save(folder / "data" / "part-0.npz", [Conversation(it, 0.0, 0, generated=[(8, len(it))]) for it in talk])
    args = argparse.Namespace(
        **{"model": target.folder, "data": folder / "data", "out": folder / "head", "begin": None, "draft_vocab": 50},
        **{"layers": list(LAYERS), "steps": STEPS, "decay": 0.9, "batch": 512, "rate": 1e-2, "seconds": 0.5},
        **{"held_out": 4, "log_every": 1, "device": "cpu", "seed": 1},
    )
    args.out.mkdir()
    train.Trainer(args).train()
    return target, args.out


def test_training_logs_what_it_does_and_how_well_drafts_stood(trained):
    lines = [json.loads(line) for line in (trained[1] / "train.log").read_text().splitlines()]
    assert lines[0]["tokens"] > 0
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses[0]) == STEPS
    assert len(lines[-1]["held_out"]["stood"]) == STEPS


def test_the_losses_gradients_are_those_of_a_plain_cross_entropy(train):
    torch.manual_seed(2)
    x, w = torch.randn(9, 16, requires_grad=True), torch.randn(30, 16, requires_grad=True)
    p = torch.randn(9, 30).softmax(-1)
    loss, best = train.CrossEntropy.apply(x, w, p)
    (loss * 0.5).backward()
    found = [x.grad.clone(), w.grad.clone()]
    x.grad = w.grad = None
    plain = torch.nn.functional.cross_entropy(x @ w.T, p, reduction="sum")
    (plain * 0.5).backward()
    assert torch.allclose(loss, plain)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, [x.grad, w.grad], strict=True))
    assert best.tolist() == (x @ w.T).argmax(-1).tolist()


@pytest.mark.parametrize("fault", [None, "positions", "a step's own keys", "the token before"])
def test_the_draft_goes_on_as_training_unrolled_it(train, trained, monkeypatch, fault):
    """Greedy drafts by the training's head, one position's steps after another, are the draft engine's; a fault in how
    training unrolls its steps is found."""
    target, folder = trained
    import head as module

    saved = load_file(folder / "model.safetensors")
    known = saved["d2t"] + torch.arange(len(saved["d2t"]))
    torch.manual_seed(1)
    scale = {name: torch.randn(p.shape) * 0.2 for name, p in saved.items() if p.is_floating_point() and p.dim() > 1}
    its = module.Head(target.model.config, len(LAYERS), scale["lm_head.weight"], saved["norm.weight"].float())
    its.load_state_dict({**scale, "fc.weight": scale["fc.weight"] * 0.05}, strict=False)
    if fault == "positions":
        rotary = its._rotary.forward
        monkeypatch.setattr(its._rotary, "forward", lambda x, positions: rotary(x, positions * 2))
    elif fault == "a step's own keys":
        attend = module.Attention.forward
        monkeypatch.setattr(
            module.Attention, "forward", lambda self, x, angles, seen: attend(self, x, angles, seen[:1])
        )
    elif fault == "the token before":
        monkeypatch.setattr(module, "ahead", lambda x, by: torch.roll(x, 1 - by, 1))
    its.eval()
    other = folder.parent / f"other-{fault}"
    other.mkdir()
    (other / "config.json").write_text((folder / "config.json").read_text())
    tensors = {name: p.detach().contiguous() for name, p in its.named_parameters()}
    save_file(tensors | {"d2t": saved["d2t"], "t2d": saved["t2d"]}, other / "model.safetensors")
    drafter = Eagle3Drafter(other, target.folder)
    embedding = target.model.get_input_embeddings().weight.detach()
    same = 0
    for number in range(12):
        tokens = np.random.default_rng(number).integers(0, VOCABULARY, 12 + number).tolist()
        session = DraftSession(number, 0, tokens)
        session.states.append(target.fed(tokens, 0, len(tokens) - 1))
        (drafts,) = drafter.propose([session], [STEPS])
        states = torch.nn.functional.pad(target.states(tokens[:-1]), (0, 0, 0, STEPS + 2))[None]
        own: list[int] = []
        for step in range(STEPS):
            row = torch.tensor([[*tokens, *own, *[0] * (STEPS + 1 - len(own))]])
            with torch.no_grad():
                out = list(its(states, row, embedding, step + 1))[step][0, len(tokens) - 2]
                own.append(int(known[its.lm_head(out).argmax()]))
        same += own == drafts
    assert (same == 12) == (fault is None), same
