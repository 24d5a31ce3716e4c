"""How late an event loop is."""

import asyncio
import math
import time

import numpy as np
import pytest

from rollmill.tasks.observe.loop_lag import LagHistogram, LoopLag

PLANTED_S = 0.8


def test_percentiles_are_those_of_the_lags_within_a_bucket() -> None:
    lags_ms = np.random.default_rng(0).lognormal(1.0, 1.5, 20_000)
    histogram = LagHistogram()
    for lag_ms in lags_ms:
        histogram.add(float(lag_ms))
    for percent in (1, 50, 90, 99, 99.9):
        exact = np.percentile(lags_ms, percent)
        assert exact * 0.99 <= histogram.percentile_ms(percent) <= exact * 1.06
    assert histogram.percentile_ms(100) == histogram.largest_ms == lags_ms.max()


def test_missed_beats_are_counted_with_their_delay() -> None:
    histogram = LagHistogram()
    histogram.add(30.0, tick_ms=10.0)
    assert histogram.n == 3
    assert histogram.percentile_ms(34) == pytest.approx(20.0, rel=0.06)
    assert histogram.percentile_ms(33) == pytest.approx(10.0, rel=0.06)


def test_a_histogram_without_lags_has_no_percentile() -> None:
    assert math.isnan(LagHistogram().percentile_ms(99))


def test_a_lag_out_of_all_proportion_is_in_the_last_bucket() -> None:
    histogram = LagHistogram()
    histogram.add(1e9)
    assert histogram.percentile_ms(50) <= histogram.largest_ms == 1e9


async def test_a_planted_stall_is_the_largest_lag_and_was_spent_running() -> None:
    lag = LoopLag(0.005)
    with lag.sample():
        await asyncio.sleep(0.05)
        _burn(PLANTED_S)
        await asyncio.sleep(0.05)
    assert lag.largest.lag_ms >= 1000 * PLANTED_S * 0.9
    assert lag.largest.running_ms >= 1000 * PLANTED_S * 0.9


async def test_a_stall_that_only_waits_was_not_spent_running() -> None:
    lag = LoopLag(0.005)
    with lag.sample():
        time.sleep(PLANTED_S)  # noqa: ASYNC251 - that is the stall
        await asyncio.sleep(0.05)
    assert lag.largest.running_ms < 1000 * PLANTED_S / 2


def _burn(cpu_s: float) -> None:
    """Use the processor for so many seconds of this thread's time."""
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass
