"""drafters/eagle3.py: a head's drafts are what its publisher's layer gives, computed without a cache, whatever came
before. The states come from a real model, so that layer ids count."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fake_heads import HIDDEN, VOCABULARY, FakeTarget, ReferenceHead
from specdec.draft.drafters import DraftSession, load_drafter
from specdec.draft.drafters.eagle3 import _AHEAD_LEAST, Eagle3Drafter
from specdec.draft.model.eagle3 import Eagle3Head
from specdec.draft.model.kv import SMALLEST, KvPool
from specdec.errors import CheckpointError, SettingsError
from specdec.heads import aux_layers_of

torch.set_num_threads(1)  # tiny tensors

KINDS = {  # published by, target's width, kind of layer, variants
    "EAGLE's own": ("eagle", HIDDEN, "llama", {}),
    "for a narrower target": ("eagle", 48, "llama", {}),
    "whole vocabulary": ("eagle", HIDDEN, "whole vocabulary", {}),
    "normed feedback": ("eagle", HIDDEN, "llama", {"norm_output": True, "fc_norm": True}),
    "NVIDIA's": ("nvidia", HIDDEN, "llama", {}),
    "NVIDIA's, normed": ("nvidia", 48, "biased", {"norm_before_fc": True}),
    "speculators": ("speculators", HIDDEN, "llama", {"norm_before_residual": True}),
    "speculators, qwen3": ("speculators", HIDDEN, "qwen3", {}),
    "speculators, deep": ("speculators", 48, "two layers", {"norm_before_residual": True, "norm_before_fc": True}),
}


class Case:
    """A head, its target and what both must compute."""

    def __init__(self, folder: Path, published: str, width: int, kind: str, norms: dict[str, bool]) -> None:
        self.target = FakeTarget(folder / "target", width)
        self.head = ReferenceHead(self.target, kind, own_embedding=width != HIDDEN, **norms)
        self.folder = self.head.save(folder / "head", published)

    def drafter(self, memory_bytes: int = 1 << 20, **options) -> Eagle3Drafter:
        return Eagle3Drafter(self.folder, self.target.folder, memory_bytes=memory_bytes, **options)

    def right(self, session: DraftSession, drafts: list[int], steps: int, start: int = 0) -> bool:
        return len(drafts) == steps and self.head.is_greedy(self.target, session, drafts, start)


@pytest.fixture(scope="module", params=KINDS)
def case(request, tmp_path_factory):
    return Case(tmp_path_factory.mktemp("case"), *KINDS[request.param])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return Case(tmp_path_factory.mktemp("plain"), *KINDS["EAGLE's own"])


def words(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(VOCABULARY) for _ in range(count)]


class FakeVerifier:
    """One session's target: prefills in chunks, then verifies drafts and accepts as many as the dice say."""

    def __init__(self, target: FakeTarget, dice: random.Random, prompt: int, number: int = 1, cut: int = 1000) -> None:
        self.target, self.dice = target, dice
        self.session = DraftSession(number, 1, words(dice, prompt))
        for begin in range(0, prompt, cut):
            self.send(begin, min(begin + cut, prompt))
        self.session.tokens += words(dice, 1)

    def send(self, begin: int, end: int, drafts: list[int] | None = None) -> None:
        self.session.states.append(self.target.fed(self.session.tokens + (drafts or []), begin, end))

    def verify(self, drafts: list[int]) -> None:
        tokens = self.session.tokens
        self.send(len(tokens) - 1, len(tokens) + len(drafts), drafts)
        accepted = self.dice.randint(0, len(drafts))
        refused = drafts[accepted] if accepted < len(drafts) else None
        tokens += drafts[:accepted]
        tokens.append(self.dice.choice([token for token in range(VOCABULARY) if token != refused]))


def agrees(case: Case, drafter: Eagle3Drafter, seed: int = 1, cycles: int = 6) -> bool:
    """Whether drafts, and features to 1e-4, are the reference's over some cycles of three sessions."""
    dice = random.Random(seed)
    verifiers = [FakeVerifier(case.target, dice, prompt, i) for i, prompt in enumerate((1, 9, 40))]
    for _ in range(cycles):
        asked = dice.sample(verifiers, dice.randint(1, 3))
        steps = [dice.randint(1, 5) for _ in asked]
        drafts = drafter.propose([v.session for v in asked], steps)
        for verifier, ids, k in zip(asked, drafts, steps, strict=True):
            feature = case.head.features(case.target, verifier.session)[-1]
            kept = drafter._contexts.get(verifier.session).feature
            if not torch.allclose(kept, feature, rtol=1e-4, atol=1e-4) or not case.right(verifier.session, ids, k):
                return False
            verifier.verify(ids)
        for verifier in verifiers:
            if verifier not in asked:
                verifier.verify([])  # a plain step
    return True


def test_drafts_and_features_are_those_of_the_published_layer(case):
    drafter = case.drafter()
    assert drafter.aux_layers == case.target.layers
    assert all(agrees(case, drafter, seed, cycles=8) for seed in range(3))
    assert drafter.counts.without_states == drafter.counts.late_starts == 0


def test_any_number_of_drafts_may_be_accepted_and_the_batch_does_not_matter(plain):
    """The rollback is exact: 40 verdicts, batches of any of 6 sessions, reading ahead now and then."""
    dice, drafter = random.Random(5), plain.drafter(max_batch=4)
    verifiers = [FakeVerifier(plain.target, dice, 3 + 7 * i, i) for i in range(6)]
    for _ in range(40):
        asked = dice.sample(verifiers, dice.randint(1, 6))
        steps = [dice.randint(1, 5) for _ in asked]
        if dice.random() < 0.3:
            drafter.ahead([v.session for v in verifiers])
        drafts = drafter.propose([v.session for v in asked], steps)
        for verifier, ids, k in zip(asked, drafts, steps, strict=True):
            assert plain.right(verifier.session, ids, k)
            verifier.verify(ids)


def test_ids_the_embedding_lacks_stop_nobodys_drafts(plain):
    """A head's own embedding may be narrower than its target's, which may be padded or know images."""
    dice, drafter = random.Random(6), plain.drafter()
    known, other = (FakeVerifier(plain.target, dice, 9, i) for i in range(2))
    other.session.tokens[4], other.session.tokens[-1] = VOCABULARY, 100_000
    for states in other.session.states:
        object.__setattr__(states, "tokens", tuple(other.session.tokens[: len(states.tokens)]))
    drafts = drafter.propose([other.session, known.session], [3, 3])
    assert plain.right(known.session, drafts[1], 3)
    assert len(drafts[0]) == 3


@pytest.mark.parametrize("cut", [1, 7, 64, 1000])
@pytest.mark.parametrize("ahead", [0, 1, 100])
def test_drafts_are_the_same_however_the_prompt_was_cut(plain, monkeypatch, cut, ahead):
    monkeypatch.setattr("specdec.draft.drafters.eagle3._PASS_TOKENS", 50)
    monkeypatch.setattr("specdec.draft.drafters.eagle3._AHEAD_TOKENS", 13)
    monkeypatch.setattr("specdec.draft.drafters.eagle3._AHEAD_LEAST", 1)
    drafter = plain.drafter()
    verifiers = [FakeVerifier(plain.target, random.Random(i), 130, i, cut) for i in range(2)]
    sessions = [v.session for v in verifiers]
    left = [drafter.ahead(sessions) for _ in range(ahead)]
    assert left == [True] * min(ahead, 19) + [False] * (ahead - 19)  # 2 x 130 states, 13 at a time
    for session, ids in zip(sessions, drafter.propose(sessions, [4, 2]), strict=True):
        assert plain.right(session, ids, len(ids))
        assert ids
    assert not any(session.states for session in sessions)


def test_reading_ahead_leaves_nothing_for_the_proposal(plain, monkeypatch):
    drafter, verifier = plain.drafter(), FakeVerifier(plain.target, random.Random(2), 30)
    while drafter.ahead([verifier.session]):
        pass
    monkeypatch.setattr(Eagle3Head, "fuse", None)  # no state is left to be read
    assert plain.right(verifier.session, drafter.propose([verifier.session], [3])[0], 3)


def test_a_few_states_wait_for_the_next_drafts(plain):
    """A session at k = 0 does not cost a pass a token."""
    drafter, verifier = plain.drafter(), FakeVerifier(plain.target, random.Random(2), 30)
    session = verifier.session
    while drafter.ahead([session]):
        pass
    cells = drafter._contexts.get(session).cells
    for waiting in range(1, 2 * _AHEAD_LEAST):
        verifier.verify([])
        assert not drafter.ahead([session])
        assert drafter._contexts.get(session).cells == cells + waiting // _AHEAD_LEAST * _AHEAD_LEAST
    assert plain.right(session, drafter.propose([session], [3])[0], 3)


def test_a_state_may_come_before_the_token_after_it(plain):
    drafter, verifier = plain.drafter(), FakeVerifier(plain.target, random.Random(3), 12)
    tokens = verifier.session.tokens
    verifier.send(12, 13)
    assert not drafter.ahead([verifier.session])
    assert plain.right(verifier.session, drafter.propose([verifier.session], [2])[0], 2)
    tokens.append(17)
    assert plain.right(verifier.session, drafter.propose([verifier.session], [2])[0], 2)


@pytest.mark.parametrize("begin", [1, 5, 29])
def test_a_reused_prefix_has_no_states_and_the_context_starts_after_it(plain, begin):
    dice, drafter = random.Random(6), plain.drafter()
    verifier = FakeVerifier(plain.target, dice, 30)
    verifier.session.states.clear()
    verifier.send(begin, 30)
    for _ in range(5):
        ids = drafter.propose([verifier.session], [3])[0]
        assert plain.right(verifier.session, ids, 3, start=begin)
        verifier.verify(ids)
    assert drafter.counts.late_starts == 1


def test_after_a_lost_frame_there_are_no_drafts_until_states_come_again(plain):
    dice, drafter = random.Random(7), plain.drafter()
    verifier = FakeVerifier(plain.target, dice, 20)
    session = verifier.session
    verifier.verify(drafter.propose([session], [3])[0])
    session.states.clear()  # lost
    assert drafter.propose([session], [3]) == [[]]
    assert drafter.counts.without_states == 1
    start = len(session.tokens) - 1
    for _ in range(4):
        verifier.verify([])
        assert plain.right(session, drafter.propose([session], [3])[0], 3, start)
    assert drafter.counts.late_starts == 1


def test_states_that_the_target_computes_again_are_not_read_again(plain):
    """After a pre-emption the whole text is a prompt."""
    dice, drafter = random.Random(8), plain.drafter()
    verifier = FakeVerifier(plain.target, dice, 20)
    session = verifier.session
    for begin in (0, 7, 15):
        verifier.verify(drafter.propose([session], [3])[0])
        verifier.send(begin, len(session.tokens))
        session.tokens.append(33)
        assert plain.right(session, drafter.propose([session], [3])[0], 3)
    assert drafter.counts.late_starts == 0


def test_a_new_epoch_starts_anew(plain):
    dice, drafter = random.Random(9), plain.drafter()
    old, new = (FakeVerifier(plain.target, dice, 20) for _ in range(2))
    new.session.epoch = 2
    old.verify(drafter.propose([old.session], [3])[0])
    drafter.forget(old.session)
    assert plain.right(new.session, drafter.propose([new.session], [3])[0], 3)
    drafter.forget(new.session)
    drafter.forget(new.session)
    assert drafter._pool.cells.free == drafter._pool.cells.size  # nothing leaks


CELL = KvPool.cell_bytes(1, 1, 32, torch.float32)


def test_sessions_beyond_the_memory_lose_their_context_and_start_late(plain):
    dice, drafter = random.Random(10), plain.drafter(memory_bytes=2 * SMALLEST * CELL)
    a, b, c = (FakeVerifier(plain.target, dice, 20, i) for i in range(3))
    for verifier in (a, b, a):
        ids = drafter.propose([verifier.session], [3])[0]
        assert plain.right(verifier.session, ids, 3)
        verifier.verify(ids)
    assert plain.right(c.session, drafter.propose([c.session], [3])[0], 3)  # b makes way
    assert drafter.evicted == 1
    drafter.forget(c.session)
    start = b.session.states[0].position
    assert plain.right(b.session, drafter.propose([b.session], [3])[0], 3, start)
    assert drafter.counts.late_starts == 1


def test_a_batch_beyond_the_memory_is_served_as_far_as_it_goes(plain):
    dice, drafter = random.Random(11), plain.drafter(memory_bytes=2 * SMALLEST * CELL)
    verifiers = [FakeVerifier(plain.target, dice, 20, i) for i in range(3)]
    sessions = [v.session for v in verifiers]
    drafts = drafter.propose(sessions, [2, 2, 2])
    assert [len(ids) for ids in drafts] == [2, 2, 0]
    assert all(plain.right(session, ids, 2) for session, ids in zip(sessions, drafts, strict=True) if ids)
    assert drafter.counts.dropped == 20
    while drafter.ahead(sessions):  # the one without memory does not take it from those drafted for
        pass
    assert [len(ids) for ids in drafter.propose(sessions, [2, 2, 2])] == [2, 2, 0]


def test_a_session_that_outgrows_its_cells_keeps_what_they_hold(plain):
    dice, drafter = random.Random(12), plain.drafter()
    verifier = FakeVerifier(plain.target, dice, SMALLEST - 3)
    for _ in range(50):
        ids = drafter.propose([verifier.session], [4])[0]
        assert plain.right(verifier.session, ids, 4)
        verifier.verify(ids)
    assert len(verifier.session.tokens) > 2 * SMALLEST


def test_a_session_at_the_context_limit_holds_nothing(plain):
    dice, drafter = random.Random(16), plain.drafter()
    verifier = FakeVerifier(plain.target, dice, drafter.context_limit - 4)
    session = verifier.session
    assert plain.right(session, drafter.propose([session], [3])[0], 3)
    while len(session.tokens) < drafter.context_limit:
        verifier.verify([])
    assert not drafter.ahead([session])
    assert not session.states
    assert drafter._pool.cells.free == drafter._pool.cells.size


def test_cells_of_a_pass_that_failed_do_not_count(plain, monkeypatch):
    dice, drafter = random.Random(13), plain.drafter()
    verifier = FakeVerifier(plain.target, dice, 20)
    with monkeypatch.context() as patch:
        patch.setattr(Eagle3Head, "fuse", None)
        with pytest.raises(TypeError):
            drafter.propose([verifier.session], [3])
    verifier.verify([])
    assert plain.right(verifier.session, drafter.propose([verifier.session], [3])[0], 3, start=20)


# ---- the check can fail


def swapped_layers(case: Case, head: Eagle3Head, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(case.target, "layers", (4, 2, 5))


def layer_off_by_one(case: Case, head: Eagle3Head, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(case.target, "layers", (2, 4, 6))


def ids_taken_as_they_are(case: Case, head: Eagle3Head, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(case.target, "layers", (1, 3, 4))


def shifted_embedding(case: Case, head: Eagle3Head, patch: pytest.MonkeyPatch) -> None:
    own = Eagle3Head.__call__
    patch.setattr(Eagle3Head, "__call__", lambda self, tokens, *rest: own(self, tokens.roll(1), *rest))


def ignored_offsets(case: Case, head: Eagle3Head, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(head, "_offsets", None)


def other_feedback(case: Case, head: Eagle3Head, patch: pytest.MonkeyPatch) -> None:
    own = Eagle3Head.__call__

    def call(self: Eagle3Head, *args) -> tuple[torch.Tensor, torch.Tensor]:
        normed, _ = own(self, *args)
        return normed, normed

    patch.setattr(Eagle3Head, "__call__", call)


def rejected_drafts_stay(case: Case, head: Eagle3Head, patch: pytest.MonkeyPatch) -> None:
    """Cells that drafting wrote count as read."""
    own = Eagle3Drafter._draft

    def draft(self, contexts, steps):
        made = own(self, contexts, steps)
        for context, wanted in zip(contexts, steps, strict=True):
            context.cells += wanted - 1
        return made

    patch.setattr(Eagle3Drafter, "_draft", draft)


MUTANTS = [
    swapped_layers,
    layer_off_by_one,
    ids_taken_as_they_are,
    shifted_embedding,
    ignored_offsets,
    other_feedback,
    rejected_drafts_stay,
]


@pytest.mark.parametrize("mutate", MUTANTS)
def test_a_mutant_is_found(tmp_path, monkeypatch, mutate: Callable[..., None]):
    """The reference computes from the right states; the drafter is given, or does, something else."""
    case = Case(tmp_path, *KINDS["EAGLE's own"])
    drafter, right = case.drafter(), FakeTarget(tmp_path / "right", HIDDEN)
    for name in ("features", "is_greedy"):
        computed = getattr(case.head, name)
        monkeypatch.setattr(case.head, name, lambda target, *args, computed=computed: computed(right, *args))
    assert agrees(case, drafter)
    mutate(case, drafter._head, monkeypatch)
    assert not agrees(case, drafter)


def test_only_the_drafts_tell_that_the_normed_feature_is_fed_back(plain, monkeypatch):
    """The first draft does not depend on it, the later ones do."""
    drafter, verifier = plain.drafter(), FakeVerifier(plain.target, random.Random(14), 30)
    right = drafter.propose([verifier.session], [5])[0]
    other_feedback(plain, drafter._head, monkeypatch)
    again = FakeVerifier(plain.target, random.Random(14), 30)
    wrong = drafter.propose([again.session], [5])[0]
    assert right[0] == wrong[0]
    assert right != wrong


# ---- types and devices


def test_bfloat16_states_come_as_uint16(plain):
    drafter = plain.drafter(dtype="bfloat16")
    session = DraftSession(1, 1, words(random.Random(15), 21))
    session.states.append(plain.target.fed(session.tokens, 0, 20, torch.bfloat16))
    drafts = drafter.propose([session], [3])[0]
    assert len(drafts) == 3
    feature = plain.head.features(plain.target, session)[-1]
    kept = drafter._contexts.get(session).feature
    assert kept.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(kept.float(), feature, dim=0) > 0.99


# ---- loading


def test_what_the_head_lacks_comes_from_the_targets_shards(plain):
    head = Eagle3Head(plain.folder, plain.target.folder, torch.device("cpu"), torch.float32)
    assert len(list(plain.target.folder.glob("*.safetensors"))) > 2
    assert torch.equal(head._embedding, plain.target.model.model.embed_tokens.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_the_lm_head_may_be_the_targets(tmp_path, tied):
    case = Case(tmp_path, *KINDS["whole vocabulary"])
    case.target = FakeTarget(tmp_path / "target", HIDDEN, tie_word_embeddings=tied)
    tensors = load_file(case.folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, case.folder / "model.safetensors")
    case.head.lm_head, case.head.d2t = case.target.model.lm_head, torch.zeros(VOCABULARY, dtype=torch.int64)
    case.head._embedding = case.target.model.model.embed_tokens
    index = json.loads((case.target.folder / "model.safetensors.index.json").read_text())
    assert ("lm_head.weight" in index["weight_map"]) is not tied
    assert agrees(case, case.drafter())


def edited(case: Case, folder: Path, change: Callable[[dict, dict], None]) -> Path:
    """A copy of the head's folder with another config or other tensors."""
    config, tensors = (
        json.loads((case.folder / "config.json").read_text()),
        load_file(case.folder / "model.safetensors"),
    )
    change(config, tensors)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if tensors:
        save_file(tensors, folder / "model.safetensors")
    return folder


def older_head(config: dict, tensors: dict) -> None:
    """EAGLE-1 and EAGLE-2: one state, no norm of it."""
    config["architectures"] = ["EagleLlamaForCausalLM"]
    tensors["fc.weight"] = torch.zeros(HIDDEN, 2 * HIDDEN)
    del tensors["midlayer.hidden_norm.weight"]


REFUSED = {
    "EAGLE-1": older_head,
    r"only a pytorch_model\.bin": lambda config, tensors: tensors.clear(),
    "Eagle3DeepseekV2ForCausalLM": lambda config, tensors: config.update(architectures=["Eagle3DeepseekV2ForCausalLM"]),
    "model type gpt2": lambda config, tensors: config.update(model_type="gpt2"),
    "type peagle": lambda config, tensors: config.update(speculators_model_type="peagle"),
    "quantized": lambda config, tensors: config.update(quantization_config={"quant_method": "fp8"}),
    "its fc turns 144 values into 64, but 3 states of this target are 192": lambda config, tensors: tensors.update(
        {"fc.weight": torch.zeros(HIDDEN, 3 * 48)}
    ),
    "a head 64 wide has no embed_tokens.weight of its own, and the target's is 48": None,  # another target
    "last, normed state": lambda config, tensors: config.update(eagle_config={"use_aux_hidden_state": False}),
    "after layer 9 of a target of 8 layers": lambda config, tensors: config.update(
        eagle_aux_hidden_state_layer_ids=[2, 4, 9]
    ),
    "no tensor d2t": lambda config, tensors: tensors.pop("d2t"),
    "LM head has 50 tokens, its d2t 40": lambda config, tensors: tensors.update(d2t=tensors["d2t"][:40].clone()),
    "no tensor layers.0.mlp.up_proj.weight": lambda config, tensors: tensors.pop("midlayer.mlp.up_proj.weight"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_a_head_is_refused_by_name(plain, tmp_path, why):
    target, change = plain.target.folder, REFUSED[why]
    if change is None:
        target = FakeTarget(tmp_path / "other", 48).folder

        def change(config: dict, tensors: dict) -> None:
            tensors["fc.weight"] = torch.zeros(HIDDEN, 3 * 48)

    folder = edited(plain, tmp_path / "head", change)
    if "bin" in why:
        (folder / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=why):
        load_drafter("eagle3", model=folder, target=target, memory_gb=0.001)


def test_the_command_line_names_it(plain, tmp_path):
    drafter = load_drafter("eagle3", model=plain.folder, target=plain.target.folder, memory_gb=0.001)
    assert isinstance(drafter, Eagle3Drafter)
    with pytest.raises(SettingsError, match="--target"):
        load_drafter("eagle3", model=plain.folder)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_drafter("eagle3", model=plain.folder, target=tmp_path)


def test_a_head_is_asked_for_its_layers_without_torch():
    code = "import sys, specdec.heads; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("config", "layers", "ids"),
    [
        ({}, 32, (2, 16, 29)),  # EAGLE's authors
        ({"eagle_config": {"use_aux_hidden_state": True}}, 61, (2, 30, 58)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}}, 61, (2, 30, 58)),  # Kimi-K2.5's
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}}, 36, (2, 18, 33)),  # NVIDIA's gpt-oss
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [24, 30, 36]}}, 36, (24, 30, 36)),  # the same, v3
        ({"eagle_aux_hidden_state_layer_ids": [3, 18, 33]}, 36, (3, 18, 33)),  # speculators
        ({"eagle_aux_hidden_state_layer_ids": [29, 2, 16]}, 32, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}, 8, (1, 4, 8)),  # counted from 0 there is no layer 8
    ],
)
def test_layers_are_counted_as_the_publisher_does(config, layers, ids):
    assert aux_layers_of(config, layers) == ids


@pytest.mark.parametrize(
    ("ids", "layers", "why"),
    [
        ([2, 16, 33], 32, "layer 33 of a target of 32"),
        ([-1, 2], 32, "layer -1"),
        ([2, 2, 5], 32, "twice"),
        (None, 2, "layer -1 of a target of 2"),
    ],
)
def test_layers_the_target_has_not_are_refused(ids, layers, why):
    with pytest.raises(CheckpointError, match=why):
        aux_layers_of({"eagle_aux_hidden_state_layer_ids": ids}, layers)
