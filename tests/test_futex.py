"""channel/futex.py: waits on a word of shared memory, across processes."""

import platform
import signal
import time

import pytest

from channel_kit import Child, Ring, until
from specdec.channel import futex
from specdec.channel.rings import Word

LONG_S = 20  # no wait below may take this: the test would have failed long before


def timed(wait, *arguments):
    start = time.monotonic()
    wait(*arguments)
    return time.monotonic() - start


@pytest.fixture
def ring():
    return Ring()


def address(ring):
    return ring.words.ctypes.data + 8 * 8  # the bell's


def test_a_word_that_has_changed_is_not_waited_for(ring):
    ring.bell.value = 7
    assert timed(futex.wait, address(ring), 6, LONG_S) < 1


@pytest.mark.parametrize("timeout_s", [0.03, 0.0005])
def test_a_wait_ends_at_its_bound(ring, timeout_s):
    took = timed(futex.wait, address(ring), 0, timeout_s)
    assert timeout_s <= took < timeout_s + 1


@pytest.mark.parametrize("timeout_s", [0, -1, -1e-9])
def test_no_time_is_no_wait(ring, timeout_s):
    assert timed(futex.wait, address(ring), 0, timeout_s) < 0.5


def test_another_process_wakes_every_waiter(ring):
    waiting, woken = Word(ring.words, 1), [Word(ring.words, i) for i in (2, 3, 4)]

    def wait(mine):
        waiting.value = 1
        futex.wait(address(ring), 0, LONG_S)
        mine.value = 1

    children = [Child(lambda mine=mine: wait(mine)) for mine in woken]
    try:
        assert until(lambda: waiting.value and all(asleep(child.pid) for child in children))
        ring.bell.ring()
        assert until(lambda: all(mine.value for mine in woken))
        assert [child.wait() for child in children] == [0, 0, 0]
    finally:
        for child in children:
            child.kill()


def asleep(pid):
    with open(f"/proc/{pid}/wchan") as wchan, open(f"/proc/{pid}/stat") as stat:
        return "futex" in wchan.read() or stat.read().rpartition(")")[2].split()[0] == "S"


def test_a_signal_ends_a_wait(ring):
    """Else SIGTERM would wait for the bound."""
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert timed(futex.wait, address(ring), 0, LONG_S) < LONG_S / 2
        assert rung
    finally:
        signal.signal(signal.SIGALRM, before)


def test_no_wake_up_is_lost():
    """Two processes take turns; each waits up to LONG_S for the other, so one lost wake-up is a failure."""
    ping, pong, rounds = Ring(), Ring(), 10_000

    def answer():
        for turn in range(rounds):
            ping.bell.wait(turn, LONG_S)
            assert ping.bell.value == turn + 1
            pong.bell.ring()

    start = time.monotonic()
    with Child(answer) as child:
        for turn in range(rounds):
            ping.bell.ring()
            pong.bell.wait(turn, LONG_S)
            assert pong.bell.value == turn + 1
        assert child.wait() == 0
    assert time.monotonic() - start < LONG_S / 2


def test_the_bell_is_compared_beyond_32_bits(ring):
    ring.bell.value = 2**32 + 5
    assert timed(ring.bell.wait, 5, LONG_S) < 1  # the low half is equal, the bell is not
    assert 0.02 <= timed(ring.bell.wait, 2**32 + 5, 0.02) < 1  # and here the kernel compares the low half
    with Child(lambda: (time.sleep(0.05), ring.bell.ring())):
        assert timed(ring.bell.wait, 2**32 + 5, LONG_S) < LONG_S / 2
    assert ring.bell.value == 2**32 + 6


def test_another_processor_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="x86-64 and aarch64, not on riscv64"):
        futex._futex_number()
