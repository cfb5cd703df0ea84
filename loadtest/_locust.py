"""Locust's side: users that hold conversations, the open loop as a shape, and honest rows in its statistics."""

import json
import logging
import random
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import locust.stats
from locust import LoadTestShape, User, task
from locust.env import Environment
from locust.runners import STATE_CLEANUP, STATE_STOPPED, STATE_STOPPING, MasterRunner, WorkerRunner

from loadtest._arrivals import SHAPES, arrivals, play
from loadtest._client import FAILED, OK, REJECTED, Sample, SetupError, Target
from loadtest._figures import Figures, per_token, sample_of, text, wall_s
from loadtest._load import Load
from loadtest._prompts import MIXED, Lengths, Prompts, read_trace

CLOSED = "closed"
_DRAIN_S = 120.0  # how long answers that have begun may take when a run ends
_APART = 1 << 20  # conversations between the first number of one of locust's processes and the next one's
log = logging.getLogger(__name__)


def bucket(milliseconds: float) -> float:
    """Three significant digits, where locust keeps whole milliseconds or two: a token takes 8.4 ms, not 8."""
    return float(f"{milliseconds:.3g}")


class Run:
    """One test, from start to stop, in one process of locust's."""

    def __init__(self, environment: Environment, options: Namespace) -> None:
        self.environment, self.options = environment, options
        self.samples: list[Sample] = []
        self.unsent: list[Sample] = []  # a worker's, that the master has not been told of
        self.start = time.perf_counter()
        self.played = False  # an open loop's schedule, to its end
        self.trouble = ""  # why no request can be sent
        self._numbers: dict[str, int] = {}
        try:
            if options.arrivals != CLOSED and isinstance(environment.runner, MasterRunner | WorkerRunner):
                raise SetupError("an open loop runs in one process: leave out --processes, --master and --worker")
            self.load = new_load(options, environment.host or "")
            self.schedule = [] if options.arrivals == CLOSED else schedule(options)
            if not isinstance(environment.runner, MasterRunner):  # it sends nothing
                self.load.prepare()
        except SetupError as error:
            self.trouble = str(error)
            log.error(error)

    def stopping(self) -> bool:
        """The test is being stopped."""
        runner = self.environment.runner
        return runner is None or runner.state in (STATE_CLEANUP, STATE_STOPPED, STATE_STOPPING)

    def number(self, kind: str) -> int:
        """The next conversation's. Each of locust's processes has numbers of its own."""
        index = getattr(self.environment.runner, "worker_index", 0) or 0
        self._numbers[kind] = self._numbers.get(kind, -1) + 1
        return int(index) * _APART + self._numbers[kind]

    def converse(self, kind: str, number: int, due: float) -> Iterator[Sample]:
        """Holds a conversation and records its requests."""
        if self.trouble:
            sample = Sample(kind=kind, status=FAILED, arrival_s=due - self.start, error=self.trouble)
            self.record(sample)
            yield sample
            return
        conversation = self.load.prompts.conversation(kind, number)
        for sample in self.load.converse(conversation, due, self.start, self.stopping):
            self.record(sample)
            yield sample

    def record(self, sample: Sample) -> None:
        """Into locust's statistics and the samples.

        Only whole requests are events, so that "Aggregated" is about those. What else is measured has rows of its own,
        past the total; a 429 is one of them, since it is neither an answer nor a fault.
        """
        self.samples.append(sample)
        if isinstance(self.environment.runner, WorkerRunner):
            self.unsent.append(sample)
        milliseconds, entry = sample.total_s * 1000, self.environment.stats.get
        if sample.status == REJECTED:
            entry(sample.kind, "429").log(milliseconds, 0)  # type: ignore[arg-type]
            return
        self.environment.events.request.fire(
            request_type="answer",
            name=sample.kind,
            response_time=milliseconds,
            response_length=0,
            exception=None if sample.status == OK else RequestFailed(sample.error),
            context={},
            start_time=time.time() - sample.total_s,
            url=self.environment.host,
        )
        if sample.status == OK:
            if sample.first_s is not None:
                entry(sample.kind, "first token").log(sample.first_s * 1000, 0)  # type: ignore[arg-type]
            if (each := per_token(sample)) is not None:
                entry(sample.kind, "time per token").log(each * 1000, 0)  # type: ignore[arg-type]

    def play(self, kinds: list[tuple[str, float]]) -> None:
        """The open loop's whole schedule; `kinds` with their weights."""
        kinds, rng = sorted(kinds), random.Random(f"{self.options.seed}/kinds")  # locust's order is any
        names = rng.choices([kind for kind, _ in kinds], [weight for _, weight in kinds], k=len(self.schedule))

        def one(number: int, due: float) -> None:
            for _ in self.converse(names[number], number, due):
                pass

        play(self.schedule, time.perf_counter(), one, self.stopping)
        self.played = True

    def summary(self) -> str:
        """The figures, of everything and by kind."""
        kinds = sorted({sample.kind for sample in self.samples})
        groups = [("all", self.samples)] if len(kinds) != 1 else []
        groups += [(kind, [s for s in self.samples if s.kind == kind]) for kind in kinds]
        wall = wall_s(self.samples)
        return "\n".join(text(Figures.of(samples, wall), name) for name, samples in groups)


class RequestFailed(Exception):
    """Locust groups failures by their text."""


def new_load(options: Namespace, host: str) -> Load:
    """The load that locust's options describe. Raises SetupError."""
    prompts = Prompts(
        options.seed,
        Lengths.parse(options.input_tokens) if options.input_tokens else None,
        Lengths.parse(options.output_tokens) if options.output_tokens else None,
        read_trace(Path(options.trace)) if options.trace else [],
    )
    fields: dict[str, Any] = {"ignore_eos": True} if options.exact_output else {}
    if options.speculative:
        fields["speculative"] = speculative(options.speculative)
    return Load(Target(host, options.api_key or ""), prompts, options.model or "", fields)


def schedule(options: Namespace) -> list[float]:
    """When requests of an open loop arrive, in seconds from the start. Raises SetupError."""
    if options.arrivals == "trace":
        if not options.trace:
            raise SetupError("--arrivals trace needs --trace FILE")
        return [row.arrival_s for row in read_trace(Path(options.trace))]
    try:
        rates = [float(rate) for rate in options.rate.split(",")]
    except ValueError as error:
        raise SetupError(f"--rate: {error}") from error
    return arrivals(options.arrivals, rates, float(options.run_time or 60), options.burst, f"{options.seed}/arrivals")


def speculative(value: str) -> str | dict[str, int]:
    """The request's field for "off", "auto" or a step count. Raises SetupError."""
    if value in ("off", "auto"):
        return value
    if value.isdigit():
        return {"steps": int(value)}
    raise SetupError(f'{value!r}: speculation is "off", "auto" or a number of steps')


class Conversing(User):
    """Holds one conversation after the other: a closed loop. In an open loop the only user of the test plays the
    schedule."""

    abstract = True
    kind: ClassVar[str] = MIXED
    run_: ClassVar[Run | None] = None  # the test's; `run` is locust's own

    def wait_time(self) -> float:
        """Seconds between conversations."""
        assert self.environment.parsed_options is not None
        return float(self.environment.parsed_options.think)

    @task
    def converse(self) -> None:
        run = Conversing.run_
        assert run is not None, "set when the test starts"
        if isinstance(self.environment.shape_class, OpenLoop) and not run.trouble:
            if run.played:
                return
            users = [user for user in self.environment.user_classes if issubclass(user, Conversing)]
            run.play([(user.kind, user.weight) for user in users])
            return
        for sample in run.converse(self.kind, run.number(self.kind), time.perf_counter()):
            if sample.status == REJECTED:
                time.sleep(min(sample.retry_after_s or 1.0, 60.0))


class OpenLoop(LoadTestShape):
    """Arrivals on a schedule. Locust's users are looked at once a second, too coarse for that: one user plays it."""

    abstract = True  # not for every run: --arrivals chooses it
    use_common_options = True  # --run-time is how long requests arrive

    def tick(self) -> tuple[int, float] | None:
        """One user, until the schedule's last answer."""
        run = Conversing.run_
        begun = self.get_run_time() > 1  # type: ignore[no-untyped-call]  # before that, `run` may be an earlier one
        return None if begun and run is not None and (run.played or run.trouble) else (1, 1.0)


def add_arguments(parser: Any) -> None:
    """The options beside locust's own; each also as LOADTEST_NAME in the environment."""

    def add(name: str, **about: Any) -> None:
        parser.add_argument(f"--{name}", env_var=f"LOADTEST_{name.upper().replace('-', '_')}", **about)

    add("model", default="", help="the model to ask; default the first that the server lists")
    add("api-key", default="", is_secret=True, help="sent as a bearer token")
    add("speculative", default="", help='every request\'s: "off", "auto" or a number of steps; default not sent')
    add("seed", type=int, default=0, help="of prompts, lengths and arrivals")
    add("input-tokens", default="", help='"200", "100-400" or "lognormal:200:0.6", instead of each kind\'s own')
    add("output-tokens", default="", help="likewise")
    add("exact-output", action="store_true", help="answers go on to their length (vLLM's ignore_eos)")
    add("trace", default="", help="a CSV file: arrival (seconds), input, output (tokens); its lengths are used")
    add("think", type=float, default=1.0, help="seconds a user of a closed loop waits between conversations")
    # The page has no field for it: locust asks for the shape before it has read the form.
    about = {"choices": [CLOSED, *SHAPES, "trace"], "include_in_web_ui": False}
    add("arrivals", default=CLOSED, help="the loop: closed, or open with arrivals", **about)
    add("rate", default="1", help="arrivals a second of an open loop; for steps several: 1,2,4")
    add("burst", type=int, default=8, help="arrivals at once in bursts")
    add("samples", default="", help="write every request's times and counts to this file (JSON lines)")


def set_up(environment: Environment) -> None:
    """What is done once locust knows its options."""
    options = environment.parsed_options
    assert options is not None
    locust.stats.STATS_TYPE_WIDTH = len("time per token")
    locust.stats.bucket_response_time = bucket  # type: ignore[assignment]  # its docs say to replace it
    several = isinstance(environment.runner, MasterRunner | WorkerRunner)
    if not environment.stop_timeout and not several:  # a worker of several is idle for as long after each test
        environment.stop_timeout = _DRAIN_S  # else answers under way at the end, the long ones, would not be counted
    if not options.user_classes and not options.class_picker:
        environment.user_classes[:] = [user for user in environment.user_classes if user.__name__ == "Mixed"]
    if options.arrivals != CLOSED and not several:
        shape = type("Arrivals", (OpenLoop,), {"abstract": False})()
        shape.runner = environment.runner
        environment.shape_class = shape
    environment.events.test_start.add_listener(_started)
    # a master has its workers' last samples only shortly before it quits
    (environment.events.quitting if several else environment.events.test_stop).add_listener(_stopped)
    environment.events.report_to_master.add_listener(_tell)
    environment.events.worker_report.add_listener(_told)


def _started(environment: Environment, **_: Any) -> None:
    assert environment.parsed_options is not None
    Conversing.run_ = None  # an earlier test's, whose schedule is played
    Conversing.run_ = Run(environment, environment.parsed_options)


def _stopped(environment: Environment, **_: Any) -> None:
    run = Conversing.run_
    if run is None or isinstance(environment.runner, WorkerRunner):
        return
    print(run.summary(), flush=True)
    if path := run.options.samples:
        with Path(path).open("w") as file:
            for sample in run.samples:
                print(json.dumps(asdict(sample)), file=file)


def _tell(data: dict[str, Any], **_: Any) -> None:
    if (run := Conversing.run_) is not None:
        data["loadtest"], run.unsent = [asdict(sample) for sample in run.unsent], []


def _told(data: dict[str, Any], **_: Any) -> None:
    if (run := Conversing.run_) is not None:
        run.samples += [sample_of(row) for row in data.get("loadtest", [])]
