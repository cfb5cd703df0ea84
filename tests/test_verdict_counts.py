"""verifier/verdict_counts.py: each figure against frames whose truth is known."""

import pytest

from specdec.proto import speculation_pb2 as pb
from specdec.telemetry import PairMetrics
from specdec.verifier import verdict_counts
from specdec.verifier.verdict_counts import VerdictCounts


class Counted:
    """Counts frames at times of the test's choosing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(verdict_counts.time, "monotonic", lambda: self.now_s)
        self.metrics = PairMetrics()
        self.counts = VerdictCounts(self.metrics, max_steps=5)

    def open(self, *sessions: int) -> None:
        self.counts.observe(pb.VerdictFrame(opened=[pb.Opened(session=session) for session in sessions]))

    def frame(self, *verdicts: pb.Verdict, **fields: int) -> None:
        self.counts.observe(pb.VerdictFrame(verdicts=verdicts, **fields))

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"specdec_{name}", labels)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def cycle(session: int, steps: int, proposed: int, accepted: int, order: int = 1, reason: int = 0) -> pb.Verdict:
    """One session's cycle."""
    return pb.Verdict(
        session=session,
        order=order,
        kind=pb.VERDICT_KIND_CYCLE,
        reason=reason,
        steps=steps,
        proposed=proposed,
        accepted=accepted,
        committed=accepted + 1,
    )


def test_acceptance_by_position(counted):
    positions = [str(i) for i in range(1, 6)]
    assert [counted.value("proposed_at_position_total", position=i) for i in positions] == [0] * 5
    counted.frame(cycle(1, 4, 4, 3), cycle(2, 4, 4, 0), cycle(3, 4, 2, 2), cycle(4, 0, 0, 0))
    assert [counted.value("proposed_at_position_total", position=i) for i in positions] == [3, 3, 2, 2, 0]
    assert [counted.value("accepted_at_position_total", position=i) for i in positions] == [2, 2, 1, 0, 0]
    assert counted.value("proposed_at_position_total", position="6") is None
    assert (counted.value("proposed_tokens_total"), counted.value("accepted_tokens_total")) == (10, 5)


def test_proposals_by_result(counted):
    late, down = pb.REASON_DRAFT_LATE, pb.REASON_DRAFT_DOWN
    counted.frame(cycle(1, 4, 4, 1), cycle(2, 4, 4, 0), cycle(3, 4, 0, 0, reason=late), cycle(4, 4, 0, 0, reason=down))
    counted.frame(cycle(5, 0, 0, 0), cycle(6, 4, 2, 2, reason=pb.REASON_DRAFT_SHORT))
    results = ("accepted", "rejected", "late", "none", "stale")
    assert [counted.value("proposals_total", result=result) for result in results] == [2, 1, 1, 1, 0]
    reasons = ("draft_late", "draft_down", "draft_short")
    assert [counted.value("short_cycles_total", reason=reason) for reason in reasons] == [1, 1, 1]


def test_step_counts_accept_lengths_and_stages(counted):
    spent = {"draft_us": 1000, "drafting_us": 700, "schedule_us": 200, "verify_us": 30_000, "output_us": 800}
    counted.frame(cycle(1, 4, 4, 3), cycle(2, 0, 0, 0), **spent)
    assert (counted.value("ordered_steps_count"), counted.value("ordered_steps_sum")) == (2, 4)
    assert (counted.value("accept_length_count"), counted.value("accept_length_sum")) == (2, 5)
    assert counted.value("cycle_seconds_sum") == pytest.approx(0.032)
    stages = ("draft", "channel", "schedule", "verify", "output")
    sums = [counted.value("stage_seconds_sum", stage=stage) for stage in stages]
    assert sums == pytest.approx([0.0007, 0.0003, 0.0002, 0.03, 0.0008])
    assert counted.value("cycles_total") == 1


def test_a_frame_without_cycles_is_no_cycle(counted):
    counted.open(1)
    counted.frame(pb.Verdict(session=1, kind=pb.VERDICT_KIND_PREFILL, committed=1), lost=2)
    assert (counted.value("cycles_total"), counted.value("cycle_seconds_count")) == (0, 0)
    assert (counted.value("tokens_total"), counted.value("lost_verdict_frames_total")) == (1, 2)


def test_sessions_by_what_they_did_last(counted):
    counted.open(1, 2, 3, 4, 5)
    counted.frame(cycle(1, 4, 4, 1), cycle(2, 0, 0, 0), cycle(3, 0, 0, 0, order=0))
    states = ("reading", "speculating", "plain", "standing")
    assert [counted.value("sessions_by_state", state=state) for state in states] == [2, 1, 1, 1]
    counted.frame(cycle(4, 2, 0, 0), pb.Verdict(session=1, kind=pb.VERDICT_KIND_CLOSED))
    assert [counted.value("sessions_by_state", state=state) for state in states] == [1, 1, 1, 1]
    assert counted.value("sessions") == 4


def test_a_sessions_rate_is_its_later_tokens_over_their_time(counted):
    counted.open(1, 2)
    for tokens in (1, 3, 2):
        kind = pb.VERDICT_KIND_PREFILL if tokens == 1 else pb.VERDICT_KIND_CYCLE
        counted.frame(pb.Verdict(session=1, kind=kind, committed=tokens))
        counted.now_s += 0.5
    counted.frame(pb.Verdict(session=1, kind=pb.VERDICT_KIND_CLOSED), pb.Verdict(session=2, kind=3))
    # 5 tokens in the second between the first frame and the last; one that had no token has no rate
    assert counted.value("session_tokens_per_second_count") == 1
    assert counted.value("session_tokens_per_second_sum") == pytest.approx(5)


def test_order_lag_is_from_the_first_order_that_no_verdict_has_named(counted):
    counted.open(1)
    counted.counts.ordered(1, 1)
    counted.now_s += 0.25
    counted.counts.ordered(1, 2)  # replaces it
    counted.now_s += 0.25
    counted.frame(cycle(1, 4, 4, 1, order=2))
    assert (counted.value("order_lag_seconds_count"), counted.value("order_lag_seconds_sum")) == (1, 0.5)
    counted.frame(cycle(1, 4, 4, 1, order=2))
    counted.counts.ordered(99, 1)  # nobody's
    assert counted.value("order_lag_seconds_count") == 1
