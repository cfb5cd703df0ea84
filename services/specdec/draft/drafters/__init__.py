"""Drafters: what turns a session's committed tokens into k guesses.

A drafter is two verbs. Built in: `ngram`, `causal`, `eagle3`. Any other class is named `module:Class`, made with no
arguments. Where it has limits of its own it also says so:

    context_limit: int          # most tokens a session may have, drafts included; longer ones are decoded plainly
    vocabulary: dict[str, int]  # its tokenizer's get_vocab(); it is compared with the target's before the first draft
    aux_layers: tuple[int, ...] # it reads the target's hidden states after so many layers each, in this order

and may have a third verb, for the time in which no outcome waits:

    def ahead(self, sessions: Collection[DraftSession]) -> bool: ...  # works; is more left?
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from specdec.channel.states import States
from specdec.errors import SettingsError
from specdec.plugins import make


@dataclass(eq=False)
class DraftSession:
    """One generation as the draft knows it: every committed token, the prompt included, and nothing of rejected ones.

    `tokens` only grows. A new epoch that says other tokens than these is a new DraftSession.
    """

    id: int
    epoch: int
    tokens: list[int] = field(default_factory=list)
    states: deque[States] = field(default_factory=deque)  # as they came, for a drafter with `aux_layers`

    def settled(self) -> Iterator[States]:
        """Takes the states of committed tokens, in the order they came; those of rejected drafts are dropped.

        A state depends on all tokens up to its own. So it is right if what was fed from its pass's first token up to it
        is what stands now; a pass that ends beyond `tokens` is kept until it is known how it ends.
        """
        while self.states:
            came = self.states[0]
            now = self.tokens[came.position : came.position + len(came.tokens)]
            right = next(
                (i for i, (fed, token) in enumerate(zip(came.tokens, now, strict=False)) if fed != token), None
            )
            if right is None and len(now) < len(came.tokens):
                return
            self.states.popleft()
            if right is None:
                yield came
            elif right:
                yield States(came.position, came.tokens[:right], came.rows[:right], came.dtype)


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


def load_drafter(
    name: str,
    *,
    model: Path | None = None,
    target: Path | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    memory_gb: float = 1.0,
    run_ahead: bool = False,
) -> Drafter:
    """A built-in drafter by its name, or `module:Class`; the others are for drafters with weights.

    Raises SettingsError if there is none such, CheckpointError if `model` cannot be a draft.
    """
    if name == "causal":
        if model is None:
            raise SettingsError("--drafter causal needs --model: the folder of a small model of the target's family")
        from specdec.draft.drafters.causal import CausalDrafter

        memory_bytes = int(memory_gb * 2**30)
        return CausalDrafter(model, device=device, dtype=dtype, memory_bytes=memory_bytes, run_ahead=run_ahead)
    if name == "eagle3":
        if model is None or target is None:
            raise SettingsError(
                "--drafter eagle3 needs --model, the folder of an EAGLE-3 head, and --target, the folder of the "
                "verifier's model: the head uses its embeddings"
            )
        from specdec.draft.drafters.eagle3 import Eagle3Drafter

        return Eagle3Drafter(model, target, device=device, dtype=dtype, memory_bytes=int(memory_gb * 2**30))
    if name == "ngram":
        from specdec.draft.drafters.ngram import NgramDrafter

        return NgramDrafter()
    return cast(Drafter, make("--drafter", name, ("ngram", "causal", "eagle3"), ("propose", "forget")))
