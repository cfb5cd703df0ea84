"""The worker's end of the hidden states: what the target computed for every token of a pass goes to the draft."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specdec.channel.segment import Role, Segment
from specdec.channel.states import Fed, StatesWriter
from specdec.heads import aux_layers_of, read_config
from specdec.verifier import HEAD_VARIABLE, SEGMENT_VARIABLE

SESSIONS_ATTRIBUTE = "specdec_sessions"  # of a SchedulerOutput: {request id: (session, epoch)}


def layers_from_environment(target_layers: int) -> tuple[int, ...] | None:
    """The layers whose states the pair's head reads, of a target of `target_layers` layers. None: there is no head.

    Raises CheckpointError if the head's config names layers the target has not.
    """
    folder = os.environ.get(HEAD_VARIABLE)
    if not folder:
        return None
    return aux_layers_of(read_config(Path(folder)), target_layers)


class HandOver:
    """Writes each pass's states, the layers joined in their order, as vLLM gives them."""

    def __init__(self, layers: Sequence[int], hidden_size: int, dtype: torch.dtype) -> None:
        self._segment = Segment.attach(Path(os.environ[SEGMENT_VARIABLE]), Role.WORKER)
        self._reads_states = self._segment.word("draft.reads_states")
        self._writer = StatesWriter(self._segment, layers, hidden_size * len(layers), _name(dtype))

    def write(
        self, scheduler_output: Any, batch: Any, ids: torch.Tensor, aux: Sequence[torch.Tensor]
    ) -> None:  # ids [T], aux [layers][T, hidden]
        """`batch`: the runner's input batch, whose requests' tokens lie in `ids` one after the other."""
        if not self._reads_states.value or not self._segment.alive(Role.DRAFT):
            return
        if self._writer.skip(scheduler_output.total_num_scheduled_tokens):
            return
        sessions = getattr(scheduler_output, SESSIONS_ATTRIBUTE)
        fed: list[Fed] = []
        spans: list[slice] = []
        at = 0
        for row, request in enumerate(batch.req_ids):
            count = scheduler_output.num_scheduled_tokens[request]
            if request in sessions:
                session, epoch = sessions[request]
                fed.append(Fed(session, epoch, int(batch.num_computed_tokens_cpu[row]), count))
                spans.append(slice(at, at + count))
            at += count
        if not fed:
            return
        states = torch.cat([layer[:at] for layer in aux], -1)
        if len(spans) < len(batch.req_ids):
            ids, states = (torch.cat([rows[span] for span in spans]) for rows in (ids, states))
        if states.dtype == torch.bfloat16:
            states = states.view(torch.uint16)
        self._writer.write(fed, ids[:at].numpy(), states.numpy())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
