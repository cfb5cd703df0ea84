"""Drafters: what turns a session's committed tokens into k guesses.

A drafter is two verbs. Built in: `ngram`. Any other class is named `module:Class`, and made with no arguments.
Where it has limits of its own it also says so:

    context_limit: int          # most tokens a session may have, drafts included; longer ones are decoded plainly
    vocabulary: dict[str, int]  # its tokenizer's get_vocab(); it is compared with the target's before the first draft
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from specdec.plugins import make


@dataclass(eq=False)
class DraftSession:
    """One generation as the draft knows it: every committed token, the prompt included, and nothing of rejected ones.

    `tokens` only grows while `epoch` stays the same; a new epoch is a new DraftSession.
    """

    id: int
    epoch: int
    tokens: list[int] = field(default_factory=list)


class Drafter(Protocol):
    """Proposes draft tokens. One thread calls it."""

    def propose(self, sessions: Sequence[DraftSession], steps: Sequence[int]) -> Sequence[Sequence[int]]:
        """For each session at most `steps[i]` token ids that may follow `sessions[i].tokens`; fewer, or none, is fine.

        What it raises is logged and counted, and the cycle goes on without drafts.
        """
        ...

    def forget(self, session: DraftSession) -> None:
        """The session has ended: drop what is kept for it."""
        ...


def load_drafter(name: str) -> Drafter:
    """A built-in drafter by its name, or `module:Class`. Raises SettingsError if there is none such."""
    if name == "ngram":
        from specdec.draft.drafters.ngram import NgramDrafter

        return NgramDrafter()
    return cast(Drafter, make("--drafter", name, ("ngram",), ("propose", "forget")))
