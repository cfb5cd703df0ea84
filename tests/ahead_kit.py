"""Sessions whose outcomes are any at all, drafted for with and without running ahead."""

import random

import torch

from specdec.draft.drafters import DraftSession
from specdec.draft.drafters.causal import CausalDrafter
from specdec.draft.runahead import MOST_BRANCHES, RANKS, Guess, RunAhead
from test_causal import is_greedy, words


@torch.inference_mode()
def choice(model, tokens, rank=0):
    """What the model holds likeliest after these tokens, or the rank-th likeliest after that."""
    return model(torch.tensor([tokens])).logits[0, -1].topk(RANKS).indices[rank].item()


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

    Beside the drafter that runs ahead there is a plain one, which is asked the same.
    """

    def __init__(self, model, folder, seed, **settings):
        self.model, self.dice = model, random.Random(seed)
        self.drafter = CausalDrafter(folder, run_ahead=True, **settings)
        self.drafter._run_ahead = FakeGuesses(self.dice)
        self.plain = CausalDrafter(folder, **settings)
        self.sessions = [DraftSession(i, 1, words(self.dice, 1 + 6 * i)) for i in range(4)]
        self.drafts = {}  # each session's last ones

    def commit(self, session):
        """An outcome of the session's last drafts."""
        drafts = self.drafts.pop(session, [])
        kind = self.dice.choice(("main", "main", "branch", "branch", "other", "several", "nothing"))
        came = drafts if kind == "main" else drafts[: self.dice.randint(0, len(drafts))]
        if kind in ("main", "branch"):
            rank = 0 if kind == "main" else self.dice.randint(1, RANKS - 1)
            came = [*came, choice(self.model, session.tokens + came, rank)]
        elif kind != "nothing":
            came = came + words(self.dice, 1 if kind == "other" else 9)
        session.tokens += came if kind != "nothing" else []

    def run(self, turns):
        for _ in range(turns):
            self.turn()

    def turn(self):
        for _ in range(self.dice.randint(0, 12)):
            self.drafter.ahead(self.sessions)
        assert all(
            len(state.lines) <= 1 + MOST_BRANCHES for s in self.sessions if (state := self.drafter._lines.get(s))
        )
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
        assert ids == plain, "other drafts than without running ahead"
        assert is_greedy(self.model, session.tokens, ids, k)
