"""Open-loop load: when requests arrive, whatever has become of those before them.

A closed loop waits for an answer before it asks again, so a slow server is asked less, and its queue never shows. An
open loop goes on asking, as the public does.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence

from loadtest._client import SetupError

SHAPES = ("poisson", "bursts", "steps")


def arrivals(shape: str, rates: Sequence[float], duration_s: float, burst: int, seed: str) -> list[float]:
    """Seconds from the start, in order, over `duration_s`. `rates` are arrivals a second.

    poisson: independent arrivals at the first rate. bursts: `burst` at the same instant, the bursts independent, the
    mean rate the same. steps: independent arrivals at each rate in turn, for equal parts of the time.
    """
    if not rates or min(rates) <= 0 or duration_s <= 0 or burst < 1:
        raise SetupError("open-loop load needs rates and a duration above 0, and bursts of at least 1")
    rng = random.Random(seed)
    if shape == "poisson":
        return _poisson(rates[0], 0.0, duration_s, rng)
    if shape == "bursts":
        return [at for at in _poisson(rates[0] / burst, 0.0, duration_s, rng) for _ in range(burst)]
    if shape == "steps":
        part = duration_s / len(rates)
        return [at for i, rate in enumerate(rates) for at in _poisson(rate, i * part, (i + 1) * part, rng)]
    raise SetupError(f"{shape!r} is none of {', '.join(SHAPES)}")


def _poisson(rate: float, start_s: float, end_s: float, rng: random.Random) -> list[float]:
    times, at = [], start_s + rng.expovariate(rate)
    while at < end_s:
        times.append(at)
        at += rng.expovariate(rate)
    return times


def play(
    schedule: Sequence[float],
    start: float,
    one: Callable[[int, float], None],
    stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Calls `one(number, due)` at each time of a schedule, each in a thread of its own, and waits for all of them.

    `start` and `due` are instants of time.perf_counter. Under locust, whose patches turn threads into greenlets, it is
    the same.
    """
    threads = []
    for number, at in enumerate(schedule):
        while (left := start + at - time.perf_counter()) > 0 and not stopping():
            time.sleep(min(left, 0.5))
        if stopping():
            break
        thread = threading.Thread(target=one, args=(number, start + at), daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
