"""draft/runahead.py, draft/lines.py and what the causal drafter does with them between outcomes."""

import random
from collections import Counter

import pytest
import torch

from channel_kit import shared_folder, until
from specdec.channel.layout import COMMIT, OPEN
from specdec.draft import lines
from specdec.draft.drafters import DraftSession
from specdec.draft.drafters.causal import CausalDrafter
from specdec.draft.model.kv import SMALLEST, KvPool
from specdec.draft.runahead import MOST_BRANCHES, RANKS, Guess, PassTime, RunAhead
from specdec.draft.settings import DraftSettings
from specdec.telemetry import DraftMetrics
from test_causal import CONFIGS, is_greedy, save, words
from test_draft_engine import FakeVerifier, RunningDraft

torch.set_num_threads(1)  # tiny tensors
CELL = 3 * 2 * 2 * 8 * 4  # bytes of one in the small model


# ---- which guesses pay


def learned(outcomes, times=1):
    policy = RunAhead()
    for _ in range(times):
        for ranks in outcomes:
            policy.learn(ranks)
    return policy


def test_a_guess_is_as_likely_as_it_was():
    policy = learned([(0, 0, 1), (0, 2), (RANKS,), (0, 1)], 50)
    assert policy.probability(Guess(0, 0)) == pytest.approx(3 / 4, abs=0.01)
    assert policy.probability(Guess(0, 1)) == 0
    assert policy.probability(Guess(1, 1)) == pytest.approx(1 / 4, abs=0.01)
    assert policy.probability(Guess(1, 2)) == pytest.approx(1 / 4, abs=0.01)
    assert policy.probability(Guess(2, 1)) == pytest.approx(1 / 4, abs=0.01)
    assert policy.probability(Guess(7, 1)) == 0


def test_old_outcomes_fade():
    policy = learned([(1,)], 500)
    for _ in range(500):
        policy.learn((2,))
    assert policy.probability(Guess(0, 1)) < 0.01 < 0.99 < policy.probability(Guess(0, 2))


def test_nothing_but_the_main_line_is_drafted_before_enough_was_seen():
    policy = learned([(1,)], 15)
    assert policy.branches(4) == []
    for _ in range(3):
        policy.learn((1,))
    assert policy.branches(4) == [Guess(0, 1)]


def test_the_likeliest_guesses_come_first_and_no_more_than_there_may_be():
    policy = learned([(1,)] * 4 + [(0, 1)] * 3 + [(0, 0, 2)] * 2 + [(0, 0, 3)] * 2 + [(2,)] * 2, 20)
    assert policy.branches(4)[:2] == [Guess(0, 1), Guess(1, 1)]
    assert len(policy.branches(4)) == MOST_BRANCHES
    assert set(policy.branches(1)) == {Guess(0, 1), Guess(1, 1), Guess(0, 2)}, "nothing past what is verified"


def test_a_branch_pays_where_its_row_costs_less_than_it_saves():
    policy = learned([(1,)] * 3 + [(0, 0)] * 7, 20)
    assert policy.branches(2) == [Guess(0, 1)]
    for rows in (1, 2, 3, 4) * 10:
        policy.time.add(rows, 0.001 * rows)  # every row costs as much as a pass alone
    assert policy.branches(2) == []
    for rows in (1, 2, 3, 4) * 200:
        policy.time.add(rows, 0.010 + 0.001 * rows)
    assert policy.branches(2) == [Guess(0, 1)]


def test_rare_guesses_are_not_worth_it_even_for_free():
    assert learned([(1,)] + [(0,)] * 40, 10).branches(2) == []


def test_the_time_of_a_pass_is_a_line_through_what_was_measured():
    times = PassTime()
    assert (times.of(3), times.of_a_row) == (0, 0)
    times.add(4, 0.02)
    assert (times.of(9), times.of_a_row) == (pytest.approx(0.02), 0)
    for rows in (1, 8, 3):
        times.add(rows, 0.012 + 0.002 * rows)
    assert times.of(16) == pytest.approx(0.044)
    assert times.of_a_row == pytest.approx(0.002)


# ---- the drafter


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return save(folder, CONFIGS[request.param]), folder


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    return save(folder, CONFIGS["llama"]), folder


class FakeGuesses(RunAhead):
    """Any guesses at all, other ones at every call."""

    def __init__(self, dice):
        super().__init__()
        self._dice = dice

    def branches(self, steps):
        everything = [Guess(accepted, rank) for accepted in range(steps + 1) for rank in range(1, RANKS)]
        return self._dice.sample(everything, min(len(everything), self._dice.randint(0, 3)))


class Interplay:
    """Sessions whose target says whatever the dice say: the draft's own next token, a runner-up, or any other.

    `told` counts outcomes by how they came about, `hit` those of them that were answered from what was kept.
    """

    def __init__(self, model, folder, seed, **settings):
        self.model, self.dice = model, random.Random(seed)
        self.metrics = DraftMetrics()
        self.drafter = CausalDrafter(folder, run_ahead=True, metrics=self.metrics, **settings)
        self.drafter._run_ahead = FakeGuesses(self.dice)
        self.plain = CausalDrafter(folder)
        self.sessions = [DraftSession(i, 1, words(self.dice, 1 + 6 * i)) for i in range(4)]
        self.kinds, self.drafts = {}, {}
        self.told, self.hit = Counter(), Counter()

    def count(self, name, **labels):
        return self.metrics.registry.get_sample_value(f"specdec_draft_{name}_total", labels)

    @torch.inference_mode()
    def likeliest(self, tokens):
        return self.model(torch.tensor([tokens])).logits[0, -1].topk(RANKS).indices.tolist()

    def commit(self, session):
        """An outcome of the session's last drafts."""
        drafts = self.drafts.pop(session, [])
        kind = self.dice.choice(("main", "main", "branch", "branch", "other", "several", "nothing"))
        accepted = drafts if kind == "main" else drafts[: self.dice.randint(0, len(drafts))]
        text = session.tokens + accepted
        rank = {"main": 0, "branch": self.dice.randint(1, RANKS - 1)}.get(kind)
        if rank is not None:
            accepted = [*accepted, self.likeliest(text)[rank]]
        elif kind != "nothing":
            accepted = accepted + words(self.dice, 1 if kind == "other" else 9)
        session.tokens += accepted if kind != "nothing" else []
        self.kinds[session] = kind

    def turn(self, most_ahead=12):
        for _ in range(self.dice.randint(0, most_ahead)):
            self.drafter.ahead(self.sessions)
        for session in self.sessions:
            if self.dice.random() < 0.9:
                self.commit(session)
        if self.dice.random() < 0.1:
            at = self.dice.randrange(len(self.sessions))
            ended = self.sessions[at]
            for drafter in (self.drafter, self.plain):
                drafter.forget(ended)
            self.sessions[at] = DraftSession(ended.id, ended.epoch + 1, words(self.dice, self.dice.randint(1, 40)))
        asked = self.dice.sample(self.sessions, self.dice.randint(1, len(self.sessions)))
        steps = [self.dice.randint(1, 5) for _ in asked]
        drafts = self.drafter.propose(asked, steps)
        for session, ids, k, plain in zip(asked, drafts, steps, self.plain.propose(asked, steps), strict=True):
            self.check(session, ids, k, plain)
            self.drafts[session] = ids

    def check(self, session, ids, k, plain):
        assert ids == plain
        assert is_greedy(self.model, session.tokens, ids, k)


@pytest.mark.parametrize("seed", range(3))
def test_proposals_are_the_same_with_and_without(model, seed):
    play = Interplay(*model, seed)
    for _ in range(60):
        play.turn()
    assert play.count("run_ahead", result="hit") > 20
    assert play.count("run_ahead", result="miss") > 20
    assert play.count("run_ahead", result="unused") > 5
    assert play.count("read_ahead_tokens") > 0
    for session in play.sessions:
        play.drafter.forget(session)
    assert play.drafter._pool.cells.free == play.drafter._pool.cells.size  # nothing leaks


class Pressed(Interplay):
    """Memory for few sessions: some find no room, and the others' drafts are right all the same."""

    def check(self, session, ids, k, plain):
        assert ids == [] or is_greedy(self.model, session.tokens, ids, k)
        self.told["served" if ids else "no room"] += 1


def test_proposals_are_right_when_memory_is_short(small):
    play = Pressed(*small, 5, memory_bytes=6 * SMALLEST * CELL)
    for _ in range(80):
        play.turn()
    assert play.drafter.evicted > 5
    assert play.told["served"] > 3 * play.told["no room"] > 0
    for session in play.sessions:
        play.drafter.forget(session)
    assert play.drafter._pool.cells.free == 6 * SMALLEST


# ---- mutants that the tests above must find


def not_copied(pool, old, new, cells, start=0):
    """The cells a branch shares with its session are not copied into it."""
    if cells == start or start or old.length == new.length:
        return
    KvPool.real_move(pool, old, new, cells)


def without_its_next_token(left, right):
    """A kept line is found by the accepted count alone."""
    pairs = list(zip(left, right, strict=False))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return len(right) if same == len(right) - 1 < len(left) else same


def test_a_branch_without_its_sessions_cells_is_found_out(small, monkeypatch):
    monkeypatch.setattr(KvPool, "real_move", KvPool.move, raising=False)
    monkeypatch.setattr(KvPool, "move", not_copied)
    play = Interplay(*small, 0)
    with pytest.raises(AssertionError):
        for _ in range(60):
            play.turn()


def test_a_line_found_without_its_next_token_is_found_out(small, monkeypatch):
    monkeypatch.setattr(lines, "common", without_its_next_token)
    play = Interplay(*small, 0)
    with pytest.raises(AssertionError):
        for _ in range(60):
            play.turn()


# ---- what it saves


class CountingModel:
    """How many tokens each pass of the drafter's model took."""

    def __init__(self, drafter):
        self.passes = []
        real = drafter._model.hidden

        def hidden(tokens, where, pool):
            self.passes.append(len(tokens))
            return real(tokens, where, pool)

        drafter._model.hidden = hidden

    def taken(self):
        passes, self.passes = self.passes, []
        return passes


def run_out(drafter, sessions):
    while drafter.ahead(sessions):
        pass


def ahead_of(folder, **settings):
    metrics = DraftMetrics()
    drafter = CausalDrafter(folder, run_ahead=True, metrics=metrics, **settings)

    def count(name, **labels):
        return metrics.registry.get_sample_value(f"specdec_draft_{name}_total", labels)

    return drafter, CountingModel(drafter), count


def test_the_main_line_is_answered_without_a_pass(small):
    model, folder = small
    drafter, passes, count = ahead_of(folder)
    session = DraftSession(1, 1, words(random.Random(1), 10))
    drafts = drafter.propose([session], [3])[0]
    for k in (3, 3, 3, 2, 1):
        run_out(drafter, [session])
        passes.taken()
        session.tokens += drafts
        text = [*session.tokens]
        with torch.inference_mode():
            session.tokens.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
        drafts = drafter.propose([session], [k])[0]
        assert is_greedy(model, session.tokens, drafts, k)
        assert passes.taken() == []
    assert count("run_ahead", result="hit") == 5
    assert count("run_ahead_saved_seconds") > 0
