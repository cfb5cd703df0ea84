"""vLLM's scheduler with the speculation loop's end in it: orders decide who runs and with how many drafts.

Runs inside vLLM's EngineCore process (`--scheduler-cls`). Drafts are set before `schedule()`, so a cycle's order, its
proposal and its verification are one step of the engine.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

from specdec.channel.rings import Word
from specdec.channel.segment import Role, Segment, now_ns
from specdec.errors import SetupError
from specdec.verifier import SEGMENT_VARIABLE, seams
from specdec.verifier.link import Deadline, Link, Session
from specdec.verifier.states import SESSIONS_ATTRIBUTE
from specdec.vocabulary import UNREADABLE, Vocabulary


class _NoSteps:
    """Stands where vLLM keeps its batch-size table: its own drafting never runs, and with a table in place it does not
    pad new sessions' first cycle with placeholder drafts no order asked for."""

    def __getitem__(self, batch_size: int) -> int:
        return 0


def _nothing_to_take(executor: Executor) -> None:
    """After each cycle vLLM asks its workers for drafts. They have none, and asking costs 4 % of a k = 0 cycle."""


_PULSE_S = 1.0


def _beat(pulse: Word) -> None:
    """Says that this process runs: vLLM's own /health does not notice one that is stopped, or never lets the GIL go."""
    while True:
        pulse.value = now_ns()
        time.sleep(_PULSE_S)


class Scheduler(VllmScheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        seams.check()
        super().__init__(*args, **kwargs)
        parallel = self.vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
            raise SetupError("pipeline and data parallelism run several cycles at once, which the loop cannot order")
        self.dynamic_sd_lookup = _NoSteps()
        Executor.get_class(self.vllm_config).take_draft_token_ids = _nothing_to_take
        segment = Segment.attach(Path(os.environ[SEGMENT_VARIABLE]), Role.ENGINE)
        threading.Thread(target=_beat, args=(segment.word("engine.pulse_ns"),), name="pulse", daemon=True).start()
        vocabulary = segment.vocabulary = self._vocabulary()
        self._with_states = segment.layout.states_mb > 0
        fixed_s = segment.word("control.draft_limit_us").value / 1e6
        deadline = Deadline(floor_s=fixed_s, cap_s=fixed_s) if fixed_s else Deadline()
        # vLLM checks a cycle's adapters against those of sessions in it, so a held one's would come on top of them
        self._link = Link(segment, vocabulary.size, deadline=deadline, may_hold=self.lora_config is None)
        self._live: dict[str, tuple[Request, Session, int]] = {}  # request id: request, session, preemptions seen
        self._started_s = self._scheduled_s = 0.0

    def _vocabulary(self) -> Vocabulary:
        """What the tokenizer knows: the model's logits may be wider, and what they pad must not be proposed."""
        config = self.vllm_config.model_config
        if config.skip_tokenizer_init:
            return Vocabulary(config.get_vocab_size(), UNREADABLE)
        known = Vocabulary.of(self.structured_output_manager.tokenizer.get_vocab())
        return known._replace(size=min(known.size, config.get_vocab_size()))

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._started_s = time.perf_counter()
        link = self._link
        link.begin()
        self._notice_changes()
        wanted = self._admit_sessions()
        drafts = link.exchange(wanted)
        requests = {session: request for request, session, _ in self._live.values() if session in wanted}
        # vLLM's own entry: it drops drafts a grammar forbids
        self.update_draft_token_ids(
            DraftTokenIds(
                [request.request_id for request in requests.values()],
                [drafts.get(session, []) for session in requests],
            )
        )
        output = super().schedule(*args, **kwargs)
        self._restore_images(output)
        self._open_sessions(output)
        if self._with_states:
            sessions = {name: (session.id, session.epoch) for name, (_, session, _) in self._live.items()}
            setattr(output, SESSIONS_ATTRIBUTE, sessions)
        for session, request in requests.items():
            if request.request_id in output.num_scheduled_tokens:
                link.scheduled(session, len(output.scheduled_spec_decode_tokens.get(request.request_id, ())))
        link.finish()  # what was opened goes out while its prompt is computed
        self._scheduled_s = time.perf_counter()
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        verified_s = time.perf_counter()
        sampled = {}  # before vLLM cuts the lists at a stop
        for request_id in scheduler_output.num_scheduled_tokens:
            if request_id in self._live and model_runner_output.sampled_token_ids:
                row = model_runner_output.req_id_to_index[request_id]
                before = self._live[request_id][0].num_output_tokens
                sampled[request_id] = (len(model_runner_output.sampled_token_ids[row]), before)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request_id, (count, before) in sampled.items():
            request, session, _ = self._live[request_id]
            delivered = request.num_output_tokens - before
            if delivered > 0 or self._link.pending(session):
                self._link.committed(session, count, delivered)
        self._notice_changes()
        self._link.finish(
            schedule_us=int((self._scheduled_s - self._started_s) * 1e6) - self._link.draft_us,
            verify_us=int((verified_s - self._scheduled_s) * 1e6),
            output_us=int((time.perf_counter() - verified_s) * 1e6),
        )
        return outputs

    def _admit_sessions(self) -> dict[Session, int]:
        """The step count of every session that may decode now; the others are held back."""
        wanted: dict[Session, int] = {}
        held = 0
        for request in self.running:
            live = self._live.get(request.request_id)
            if live is None or request.num_computed_tokens != request.num_tokens - 1 or not request.num_output_tokens:
                continue  # a prompt being read: nothing to speculate on, and never held
            session = live[1]
            steps = self._link.admit(session)
            if steps is None:
                # taking it out of self.running instead trips an assertion once sessions wait for admission
                request.next_decode_eligible_step = self.current_step + 2
                request.spec_token_ids = []
                held += 1
                continue
            # a draft past the last token the session may still deliver cannot stand
            wanted[session] = max(0, min(steps, request.max_tokens - request.num_output_tokens - 1))
        if held and held == len(self.running) and not self.waiting:
            self._link.wait_for_orders(0.001)
        return wanted

    def _restore_images(self, output: SchedulerOutput) -> None:
        """vLLM 0.32 does not send the worker an image that a new request's prefix hit covers, nor does model runner V1
        get it later: once such a request is preempted, and its blocks are given away, reading it again would end the
        engine."""
        for new in output.scheduled_new_reqs:
            new.mm_features = self.requests[new.req_id].mm_features

    def _open_sessions(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            request = self.requests[new.req_id]
            if request.resumable:
                continue  # its tokens may be taken back between turns; it decodes plainly
            session = self._link.open(request.request_id, request.all_token_ids, request.num_prompt_tokens)
            if session is not None:
                self._live[request.request_id] = (request, session, request.num_preemptions)

    def _notice_changes(self) -> None:
        """Ended sessions are closed, preempted ones get a new epoch."""
        ended = []
        for request_id, (request, session, preemptions) in self._live.items():
            if request.is_finished():
                ended.append((request_id, session))
            elif request.num_preemptions != preemptions:
                self._link.restart(session)
                self._live[request_id] = (request, session, request.num_preemptions)
        for request_id, session in ended:
            del self._live[request_id]
            self._link.close(session)
