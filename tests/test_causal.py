"""drafters/causal.py: a causal model's drafts are what transformers' greedy generation gives, whatever came before."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from specdec.draft.drafters import DraftSession, load_drafter
from specdec.draft.drafters.causal import CausalDrafter
from specdec.draft.model.kv import SMALLEST
from specdec.errors import CheckpointError, SettingsError

torch.set_num_threads(1)  # tiny tensors

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama tied, long": LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3),
    "llama with biases": LlamaConfig(**SIZES, attention_bias=True, head_dim=16),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3 yarn": Qwen3Config(**SIZES, head_dim=16, rope_parameters=YARN),
}


def save(folder: Path, config: PretrainedConfig, shards: str = "5GB") -> torch.nn.Module:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder, max_shard_size=shards)
    return model


@torch.inference_mode()
def is_greedy(model: torch.nn.Module, tokens: list[int], drafts: list[int], k: int) -> bool:
    """Whether the drafts are the k tokens that greedy decoding gives: each the likeliest after all before it."""
    logits = model(torch.tensor([[*tokens, *drafts]])).logits[0, len(tokens) - 1 : -1]
    return len(drafts) == k and logits.argmax(-1).tolist() == drafts


@pytest.fixture(scope="module", params=CONFIGS)
def reference(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return save(folder, CONFIGS[request.param], "20KB"), folder


def words(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(97) for _ in range(count)]


def test_drafts_are_the_models_own_greedy_text(reference):
    model, folder = reference
    dice, drafter = random.Random(1), CausalDrafter(folder)
    sessions = [DraftSession(i, 1, words(dice, n)) for i, n in enumerate((1, 2, 33, 200))]
    steps = [4, 1, 7, 3]
    drafts = drafter.propose(sessions, steps)
    assert all(is_greedy(model, s.tokens, ids, k) for s, ids, k in zip(sessions, drafts, steps, strict=True))


def test_any_number_of_drafts_may_be_accepted_and_any_token_follow(reference):
    """The rollback is exact: after every verdict the drafts are those of a model that has seen only what stands."""
    model, folder = reference
    dice, drafter = random.Random(2), CausalDrafter(folder)
    sessions = [DraftSession(i, 1, words(dice, 5)) for i in range(5)]
    for _ in range(12):
        asked = dice.sample(sessions, dice.randint(1, 5))
        steps = [dice.randint(1, 5) for _ in asked]
        drafts = drafter.propose(asked, steps)
        assert all(is_greedy(model, s.tokens, ids, k) for s, ids, k in zip(asked, drafts, steps, strict=True))
        for session, ids in zip(asked, drafts, strict=True):
            session.tokens += ids[: dice.randint(0, len(ids))] + words(dice, dice.choice((0, 1, 1, 1, 9)))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    return save(folder, CONFIGS["llama"]), folder


def test_ids_the_model_does_not_know_stop_nobodys_drafts(small):
    """A target may know more: padding, an image's placeholder."""
    model, folder = small
    drafter, dice = CausalDrafter(folder), random.Random(4)
    known = DraftSession(1, 1, words(dice, 9))
    others = [DraftSession(2, 1, [3, 97, 5, 6]), DraftSession(3, 1, [*words(dice, 8), 100_000])]
    drafts = drafter.propose([others[0], known, others[1]], [3, 3, 3])
    assert is_greedy(model, known.tokens, drafts[1], 3)
    assert [len(ids) for ids in drafts] == [3, 3, 3]


def test_a_long_prompt_is_read_in_pieces(small, monkeypatch):
    model, folder = small
    monkeypatch.setattr("specdec.draft.drafters.causal._PASS_TOKENS", 7)
    session = DraftSession(1, 1, words(random.Random(3), 100))
    assert is_greedy(model, session.tokens, CausalDrafter(folder).propose([session], [3])[0], 3)


def test_sessions_beyond_the_memory_lose_their_state_the_least_recently_used_first(small):
    model, folder = small
    cell = 3 * 2 * 2 * 8 * 4
    drafter = CausalDrafter(folder, memory_bytes=3 * SMALLEST * cell)
    dice = random.Random(4)
    sessions = [DraftSession(i, 1, words(dice, 20)) for i in range(4)]
    for session in (sessions[0], sessions[1], sessions[2], sessions[0], sessions[3]):
        assert is_greedy(model, session.tokens, drafter.propose([session], [3])[0], 3)
    assert drafter.evicted == 1  # sessions[1], which finds no room beside the three others
    drafts = drafter.propose(sessions, [2] * 4)
    assert [len(ids) for ids in drafts] == [2, 0, 2, 2]
    assert all(is_greedy(model, s.tokens, ids, 2) for s, ids in zip(sessions, drafts, strict=True) if ids)
    drafter.forget(sessions[0])
    assert is_greedy(model, sessions[1].tokens, drafter.propose(sessions[1:2], [2])[0], 2)
    for session in sessions:
        drafter.forget(session)
    drafter.forget(sessions[0])
    assert drafter._pool.cells.free == 3 * SMALLEST  # nothing leaks


def test_a_session_that_outgrows_its_cells_keeps_what_they_hold(small):
    model, folder = small
    drafter, session = CausalDrafter(folder), DraftSession(1, 1, words(random.Random(5), SMALLEST - 2))
    for _ in range(60):
        drafts = drafter.propose([session], [4])[0]
        assert is_greedy(model, session.tokens, drafts, 4)
        session.tokens += [*drafts[:2], 5]
    assert len(session.tokens) > 3 * SMALLEST


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (LlamaConfig(**SIZES, hidden_act="gelu"), "gelu"),
        (LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "dynamic"),
    ],
)
def test_what_is_not_computed_here_is_refused_by_name(tmp_path, config, why):
    save(tmp_path, config)
    with pytest.raises(CheckpointError, match=why):
        CausalDrafter(tmp_path)


def test_the_command_line_names_it(small):
    assert isinstance(load_drafter("causal", model=small[1]), CausalDrafter)
    with pytest.raises(SettingsError, match="--model"):
        load_drafter("causal")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_drafter("causal", model=Path("/nowhere"))


def test_missing_files_are_named(tmp_path):
    save(tmp_path, CONFIGS["llama"], "20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        CausalDrafter(tmp_path)
