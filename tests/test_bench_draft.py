"""draft/bench.py: `specdec bench draft` on a toy model on the CPU, and what it counts."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from specdec.cli import main
from specdec.draft.bench import Variant, Work, bandwidth_of
from specdec.draft.drafters.eagle3 import Eagle3Drafter
from specdec.draft.random_models import HEADS, SHAPES, write_random, write_random_head

torch.set_num_threads(1)
QUICK = ["bench", "draft", "--shape", "tiny", "--batches", "1,3", "--contexts", "64,128", "--rounds", "3"]


def test_every_variant_has_its_row_beside_its_floor(tmp_path, capsys):
    out = tmp_path / "result.json"
    assert main([*QUICK, "--steps", "1,4", "--most-tokens", "200", "--out", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    written = json.loads(out.read_text())
    samples = written.pop("samples")
    assert written == printed
    kinds = [(row["batch"], row["context"], row["k"]) for row in printed["rows"]]
    assert kinds == [(1, 64, 1), (1, 64, 4), (3, 64, 1), (3, 64, 4), (1, 128, 1), (1, 128, 4)]  # 3 x 128 is too much
    assert all(row["ms"] > row["floor_ms"] > 0 for row in printed["rows"])
    assert [len(sample["ms"]) for sample in samples] == [3] * 6
    assert printed["command"].startswith("specdec bench draft --shape tiny")
    assert printed["bandwidth_gb_s"] > 0


def test_a_head_is_timed_on_states_that_the_target_sends(tmp_path, capsys, monkeypatch):
    made = []
    own = Eagle3Drafter.propose

    def propose(self, sessions, steps):
        drafts = own(self, sessions, steps)
        made.append((self, [len(ids) for ids in drafts], steps))
        return drafts

    monkeypatch.setattr(Eagle3Drafter, "propose", propose)
    head = ["bench", "draft", "--drafter", "eagle3", "--batches", "1,3", "--rounds", "4", "--steps", "1,4", "--json"]
    assert main([*head, "--shape", "eagle3-tiny", "--contexts", "64,600"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["batch"], row["context"], row["k"]) for row in rows[:3]] == [(1, 64, 1), (1, 64, 4), (3, 64, 1)]
    assert all(row["ms"] > row["floor_ms"] > 0 for row in rows)
    assert all(row["step_ms"] == pytest.approx(row["ms"] / row["k"], abs=1e-3) for row in rows)
    assert all(counts == steps for _, counts, steps in made)  # no proposal lacked a state
    assert len(made) == 8 * 5
    assert made[0][0].counts.late_starts == 0
    write_random_head(tmp_path / "head", tmp_path / "target", HEADS["eagle3-tiny"], torch.device("cpu"))
    folders = ["--model", str(tmp_path / "head"), "--target", str(tmp_path / "target")]
    assert main([*head, *folders, "--contexts", "64", "--dtype", "fp8"]) == 0
    assert [row["floor_ms"] > 0 for row in json.loads(capsys.readouterr().out)["rows"]] == [True] * 4


def test_the_table_and_a_drafter_without_weights(capsys):
    assert main(["bench", "draft", "--drafter", "ngram", "--batches", "2", "--contexts", "64", "--rounds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:4] == ["ngram", "2", "64", "5"]
    assert "memory bandwidth" in lines[-1]


@pytest.mark.parametrize("tied", [True, False])
def test_the_floor_counts_every_matrix_once_and_an_embedding_not_at_all(tmp_path, tied):
    sizes = SHAPES["tiny"].to_dict() | {"tie_word_embeddings": tied, "num_hidden_layers": 1}
    write_random(tmp_path, LlamaConfig(**sizes), torch.device("cpu"))
    hidden, mlp, vocabulary, kv = 64, 128, 256, 32
    layer = 2 * hidden * hidden + 2 * kv * hidden + 3 * hidden * mlp + 2 * hidden
    work = Work.of(tmp_path, "bfloat16")
    assert work == Work(2 * (layer + hidden + vocabulary * hidden), 2 * kv * 2)
    assert Work.of(tmp_path, "fp8") == Work(work.weights // 2, work.cell)
    floor = work.floor_ms(Variant(batch=3, context=100, k=2), bandwidth=1e6)
    assert floor == pytest.approx(2 * (work.weights + 300 * work.cell) / 1e3)


def test_the_floor_of_a_head_counts_fc_once_a_proposal(tmp_path):
    head, target = tmp_path / "head", tmp_path / "target"
    write_random_head(head, target, HEADS["eagle3-tiny"], torch.device("cpu"))
    hidden, mlp, drafted, kv = 64, 128, 100, 32
    attention = 2 * hidden * (hidden + 2 * kv) + hidden * hidden
    every = attention + 3 * hidden * mlp + 4 * hidden + drafted * hidden
    work = Work.of_head(head, target, "bfloat16")
    assert work == Work(2 * every, 2 * kv * 2, 2 * 3 * hidden * hidden)
    assert Work.of_head(head, target, "fp8") == Work(every, work.cell, work.opening)
    floor = work.floor_ms(Variant(batch=3, context=100, k=2), bandwidth=1e6)
    assert floor == pytest.approx((2 * (work.weights + 300 * work.cell) + work.opening) / 1e3)
    tensors = load_file(head / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, head / "model.safetensors")
    assert Work.of_head(head, target, "bfloat16").weights == work.weights + 2 * (256 - drafted) * hidden


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["bench", "draft"], "--shape or --model"),
        ([*QUICK, "--model", "/nowhere"], "either --shape or --model"),
        ([*QUICK, "--drafter", "eagle3"], "--shape tiny is not for --drafter eagle3"),
        (["bench", "draft", "--shape", "eagle3-tiny"], "--shape eagle3-tiny is not for --drafter causal"),
        (["bench", "draft", "--drafter", "eagle3"], "--drafter eagle3 needs --shape or --model"),
        (["bench", "draft", "--drafter", "eagle3", "--model", "/nowhere"], "--target"),
        ([*QUICK[:-4], "--contexts", "20", "--rounds", "30"], "too few"),
    ],
)
def test_what_cannot_be_run_is_said(arguments, why, capsys):
    assert main(arguments) == 2
    assert why in capsys.readouterr().err


def test_bandwidth_is_a_copy_s():
    assert 1e8 < bandwidth_of(torch.device("cpu")) < 1e13
