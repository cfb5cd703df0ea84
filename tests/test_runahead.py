"""draft/runahead.py, draft/lines.py and what the causal drafter does with them between outcomes."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from ahead_kit import Interplay, choice
from channel_kit import shared_folder, until
from specdec.channel.layout import COMMIT, OPEN
from specdec.draft import lines
from specdec.draft.drafters import DraftSession
from specdec.draft.drafters.causal import CausalDrafter
from specdec.draft.lines import Line, Lines
from specdec.draft.model.kv import SMALLEST
from specdec.draft.runahead import MOST_BRANCHES, RANKS, AheadCounts, Guess, PassTime, RunAhead
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


@pytest.mark.parametrize("seed", range(3))
def test_proposals_are_the_same_with_and_without(model, seed):
    play = Interplay(*model, seed, max_batch=(64, 3, 1)[seed])
    play.run(60)
    assert play.drafter.ahead_counts.hits > 20
    assert play.drafter.ahead_counts.misses > 20
    assert play.drafter.ahead_counts.unused > 5
    assert play.drafter.ahead_counts.read > 0
    for session in play.sessions:
        play.drafter.forget(session)
    assert play.drafter._pool.cells.free == play.drafter._pool.cells.size  # nothing leaks


class FakeGraphSteps:
    """As GraphSteps: every row takes the most steps."""

    def __init__(self, eager):
        self._eager = eager

    def ranked(self, rows, steps):
        drafts = self._eager.ranked(rows, [max(steps)] * len(rows))
        return [ids[:k] for ids, k in zip(drafts, steps, strict=True)]


def test_steps_that_all_rows_take_write_into_no_other_sessions_cells(small):
    play = Interplay(*small, 4)
    play.drafter._steps = FakeGraphSteps(play.drafter._steps)
    play.run(80)
    assert play.drafter.ahead_counts.hits > 10
    assert any(len(play.drafter._lines[s].lines) > 1 for s in play.sessions if play.drafter._lines.get(s))


class Pressed(Interplay):
    """Memory for few sessions: some find no room, and the others' drafts are right all the same."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.served = Counter()

    def check(self, session, ids, k, plain):
        assert ids == [] or is_greedy(self.model, session.tokens, ids, k)
        self.served[bool(ids)] += 1


def test_proposals_are_right_when_memory_is_short(small):
    play = Pressed(*small, 5, memory_bytes=6 * SMALLEST * CELL)
    play.run(80)
    assert play.drafter.evicted > 5
    assert play.served[True] > 3 * play.served[False] > 0
    for session in play.sessions:
        play.drafter.forget(session)
    assert play.drafter._pool.cells.free == 6 * SMALLEST


# ---- mutants that the tests above must find


def branches_without_cells(monkeypatch):
    """The cells a branch shares with its session are not copied."""
    real = Lines.branch

    def branch(self, *args):
        pool, self._pool = self._pool, SimpleNamespace(cells=self._pool.cells, move=lambda *_, **__: None)
        try:
            return real(self, *args)
        finally:
            self._pool = pool

    monkeypatch.setattr(Lines, "branch", branch)


def lines_without_their_next_token(monkeypatch):
    """A kept line is found by the accepted count alone."""
    real = lines.common

    def common(ids, came):
        right = real(ids, came)
        return len(came) if right == len(came) - 1 < len(ids) else right

    monkeypatch.setattr(lines, "common", common)


def cells_of_rejected_drafts(monkeypatch):
    """What drafts that did not stand have left in the cells is taken for the text's own."""
    real = Line.follow

    def follow(self, tokens):
        cells = self.cells
        real(self, tokens)
        self.cells = cells

    monkeypatch.setattr(Line, "follow", follow)


@pytest.mark.parametrize("mutant", [branches_without_cells, lines_without_their_next_token, cells_of_rejected_drafts])
def test_a_mutant_is_found_out(small, monkeypatch, mutant):
    mutant(monkeypatch)
    play = Interplay(*small, 0)
    with pytest.raises(AssertionError, match="other drafts"):
        play.run(60)


# ---- what it saves


class Watched:
    """A drafter that runs ahead with real guesses; every pass of its model is counted."""

    def __init__(self, folder, guesses=(), **settings):
        self.passes = []
        self.drafter = CausalDrafter(folder, run_ahead=True, **settings)
        self.counts = self.drafter.ahead_counts
        self.drafter._run_ahead.branches = lambda steps: list(guesses)
        self._hidden, self.drafter._model.hidden = self.drafter._model.hidden, self.hidden

    def hidden(self, tokens, where, pool):
        self.passes.append(len(tokens))
        return self._hidden(tokens, where, pool)

    def propose(self, sessions, steps):
        """(drafts, passes that it took)"""
        before = len(self.passes)
        drafts = self.drafter.propose(sessions, steps)
        return drafts, len(self.passes) - before

    def finish_and_propose(self, session, k):
        self.finish([session])
        self.propose([session], [k])

    def in_a_loop(self):
        """The drafter as the engine's loop calls it, and a list of the passes each proposal takes."""
        real, taken = self.drafter.propose, []

        def propose(sessions, steps):
            before = len(self.passes)
            drafts = real(sessions, steps)
            taken.append(len(self.passes) - before)
            return drafts

        self.drafter.propose = propose
        return self.drafter, taken

    def finish(self, sessions):
        """All there is to do ahead. Returns the passes it took."""
        before = len(self.passes)
        while self.drafter.ahead(sessions):
            assert len(self.passes) - before < 100
        return self.passes[before:]


def test_the_main_line_is_answered_without_a_pass_whatever_k_is_next(small):
    model, folder = small
    watched, session = Watched(folder), DraftSession(1, 1, words(random.Random(1), 10))
    [drafts], _ = watched.propose([session], [3])
    for k in (3, 3, 2, 1, 1):
        watched.finish([session])
        session.tokens += drafts
        session.tokens.append(choice(model, session.tokens))
        [drafts], passes = watched.propose([session], [k])
        assert is_greedy(model, session.tokens, drafts, k)
        assert passes == 0
    assert watched.counts.hits == 5
    assert watched.counts.misses == 0
    assert watched.counts.saved_s > 0


def test_what_is_kept_is_continued_when_more_is_wanted(small):
    model, folder = small
    watched, session = Watched(folder), DraftSession(1, 1, words(random.Random(1), 10))
    [drafts], _ = watched.propose([session], [2])
    watched.finish([session])
    session.tokens += drafts
    session.tokens.append(choice(model, session.tokens))
    [drafts], passes = watched.propose([session], [5])
    assert is_greedy(model, session.tokens, drafts, 5)
    assert passes == 3
    assert watched.counts.misses == 1


@pytest.mark.parametrize(("accepted", "rank"), [(0, 1), (1, 3), (3, 2)])
def test_a_branch_that_comes_true_is_answered_without_a_pass_and_becomes_the_session(small, accepted, rank):
    model, folder = small
    watched = Watched(folder, [Guess(accepted, rank), Guess(2, 1)])
    session = DraftSession(1, 1, words(random.Random(2), 30))
    for _ in range(4):
        [drafts], _ = watched.propose([session], [3])
        assert max(watched.finish([session])) == 2 * 3, "the main line and two branches go through it together"
        session.tokens += drafts[:accepted]
        session.tokens.append(choice(model, session.tokens, rank))
        [drafts], passes = watched.propose([session], [3])
        assert is_greedy(model, session.tokens, drafts, 3)
        assert passes == 0
        session.tokens += words(random.Random(3), 1)
    assert watched.counts.hits == 4


def test_a_miss_is_drafted_for_alone_and_its_frames_hits_wait_for_it(small):
    model, folder = small
    watched, dice = Watched(folder), random.Random(4)
    sessions = [DraftSession(i, 1, words(dice, 20)) for i in range(3)]
    drafts, _ = watched.propose(sessions, [2, 2, 2])
    watched.finish(sessions)
    for session, ids in zip(sessions, drafts, strict=True):
        session.tokens += ids
        session.tokens.append(choice(model, session.tokens, rank=int(session.id == 1)))
    watched.passes.clear()
    drafts, _ = watched.propose(sessions, [2, 2, 2])
    assert watched.passes == [2, 1]
    assert all(is_greedy(model, s.tokens, ids, 2) for s, ids in zip(sessions, drafts, strict=True))
    assert watched.counts == AheadCounts(hits=2, misses=1, waited=2)


def test_drafts_for_which_nobody_asked_again_are_counted(small):
    watched, dice = Watched(small[1]), random.Random(5)
    sessions = [DraftSession(i, 1, words(dice, 20)) for i in range(2)]
    watched.propose(sessions, [2, 2])
    watched.finish(sessions)
    sessions[0].tokens += words(dice, 1)
    watched.finish(sessions)
    watched.drafter.forget(sessions[1])
    watched.drafter.forget(sessions[0])
    assert watched.counts.unused == 2


def test_it_learns_which_branches_pay(small, monkeypatch):
    """The target always says the draft's second choice: after a while that is what is drafted for."""
    monkeypatch.setattr(PassTime, "of_a_row", 0.0)
    model, folder = small
    drafter = CausalDrafter(folder, run_ahead=True)
    session = DraftSession(1, 1, words(random.Random(6), 5))
    for _ in range(40):
        drafts = drafter.propose([session], [2])[0]
        assert is_greedy(model, session.tokens, drafts, 2)
        while drafter.ahead([session]):
            pass
        session.tokens.append(choice(model, session.tokens, rank=1))
    assert 20 <= drafter.ahead_counts.hits <= 24, "from the sixteenth outcome on"


def test_running_ahead_ends_at_the_context_limit(small):
    model, folder = small
    watched, session = Watched(folder, [Guess(0, 1)]), DraftSession(1, 1, words(random.Random(7), 512 - 4))
    [drafts], _ = watched.propose([session], [3])
    watched.finish([session])
    assert max(line.end for line in watched.drafter._lines[session].lines) <= 512
    assert is_greedy(model, session.tokens, drafts, 3)


def test_a_pass_that_fails_leaves_no_cells_that_were_not_computed(small):
    model, folder = small
    watched, session = Watched(folder, [Guess(0, 1)]), DraftSession(1, 1, words(random.Random(14), 40))
    real, fails = watched.drafter._model.hidden, []

    def hidden(*args):
        if fails.pop():
            raise MemoryError
        return real(*args)

    watched.drafter._model.hidden = hidden
    for fails_at in range(3):
        session.tokens += words(random.Random(fails_at), 40)
        fails[:] = [False] * 50 + [True] + [False] * fails_at
        with pytest.raises(MemoryError):
            watched.finish_and_propose(session, 3)
        [drafts], _ = watched.propose([session], [3])
        assert is_greedy(model, session.tokens, drafts, 3)


# ---- reading before drafts are wanted


def test_a_prompt_is_read_in_short_passes_before_its_first_proposal(small, monkeypatch):
    model, folder = small
    monkeypatch.setattr("specdec.draft.drafters.causal._AHEAD_TOKENS", {"cpu": 7})
    watched, dice = Watched(folder), random.Random(8)
    sessions = [DraftSession(i, 1, words(dice, n)) for i, n in enumerate((1, 2, 3, 40, 17))]
    assert watched.finish(sessions) == [7] * 7 + [5]
    assert watched.counts.read == 1 + 38 + 15
    for session in sessions:
        session.tokens += words(dice, 3)
    assert sum(watched.finish(sessions)) == 2 + 3 * 4
    watched.passes.clear()
    drafts, _ = watched.propose(sessions, [2] * 5)
    assert watched.passes == [10, 5], "no pass for the prompts"
    assert all(is_greedy(model, s.tokens, ids, 2) for s, ids in zip(sessions, drafts, strict=True))


def test_reading_takes_free_memory_only_and_makes_way_first(small):
    model, folder = small
    watched, dice = Watched(folder, memory_bytes=3 * SMALLEST * CELL), random.Random(9)
    drafting = [DraftSession(i, 1, words(dice, 20)) for i in range(2)]
    watched.propose(drafting, [2, 2])
    read = [DraftSession(10 + i, 1, words(dice, 20)) for i in range(2)]
    assert watched.finish(drafting + read)[0] == 18, "there is room for one of them"
    assert watched.drafter.evicted == 0
    third = DraftSession(3, 1, words(dice, 20))
    [drafts], _ = watched.propose([third], [2])
    assert is_greedy(model, third.tokens, drafts, 2)
    assert watched.drafter.evicted == 1
    assert [watched.drafter._lines.get(s) is not None for s in [*drafting, third, *read]] == [True] * 3 + [False] * 2


def test_branches_make_way_before_sessions_do(small):
    watched = Watched(small[1], [Guess(0, 1), Guess(0, 2)], memory_bytes=4 * SMALLEST * CELL)
    dice = random.Random(10)
    sessions = [DraftSession(i, 1, words(dice, 20)) for i in range(4)]
    watched.propose(sessions[:2], [2, 2])
    watched.finish(sessions[:2])
    assert watched.drafter._pool.cells.free == 0
    drafts, _ = watched.propose(sessions[2:], [2, 2])
    assert [len(ids) for ids in drafts] == [2, 2]
    assert watched.drafter.evicted == 0


def test_without_run_ahead_nothing_is_done_between_outcomes(small):
    drafter, session = CausalDrafter(small[1]), DraftSession(1, 1, words(random.Random(11), 20))
    drafter.propose([session], [2])
    session.tokens += words(random.Random(12), 30)
    drafter._model = None
    assert drafter.ahead([session]) is False


@pytest.mark.parametrize(
    ("flag", "device", "on"),
    [("auto", "cpu", False), ("auto", "cuda:0", True), ("on", "cpu", True), ("off", "cuda", False)],
)
def test_it_is_on_where_the_draft_has_a_device_of_its_own(flag, device, on):
    assert DraftSettings(run_ahead=flag, device=device).runs_ahead is on


def test_its_counts_are_metrics():
    metrics, counts = DraftMetrics(), AheadCounts(hits=3, misses=2, unused=1)
    metrics.show(SimpleNamespace(ahead_counts=counts, evicted=7), run_ahead=True)
    counts.waited, counts.saved_s, counts.read = 4, 0.25, 100

    def value(name, **labels):
        return metrics.registry.get_sample_value(f"specdec_draft_{name}_total", labels)

    assert [value("run_ahead", result=result) for result in ("hit", "miss", "unused")] == [3, 2, 1]
    names = ("run_ahead_waited", "run_ahead_saved_seconds", "read_ahead_tokens", "evicted_sessions")
    assert [value(name) for name in names] == [4, 0.25, 100, 7]


# ---- in the draft's loop


def test_a_guess_that_holds_is_answered_with_no_pass_after_the_outcome(small):
    model, folder = small
    watched = Watched(folder, [Guess(1, 1)])
    drafter, taken = watched.in_a_loop()
    with (
        shared_folder() as shared,
        FakeVerifier(shared / "specdec-p") as verifier,
        RunningDraft(verifier.owner.path, drafter) as draft,
    ):
        tokens = words(random.Random(13), 12)
        verifier.tell((1, 1, OPEN, 3, 0, tokens))
        drafts = verifier.proposal()[1][0][2]
        for accepted, rank in ((3, 0), (1, 1), (3, 0), (0, 3)):
            lines = drafter._lines[draft.engine._sessions.get(1)].lines
            assert until(lambda lines=lines: len(lines[0].ids) == 7 and len(lines[1].ids) == 5)
            came = drafts[:accepted]
            came.append(choice(model, tokens + came, rank))
            verifier.tell((1, 1, COMMIT, 3, len(tokens), came))
            tokens += came
            drafts = verifier.proposal()[1][0][2]
            assert is_greedy(model, tokens, drafts, 3)
        assert taken == [4, 0, 0, 0, 3], "the prompt's pass and three steps, three hits, and a miss"
