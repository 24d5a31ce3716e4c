"""The monitor of an event loop measures stalls, and with samples names the code."""

import asyncio
import ctypes
import gc
import threading
import time
from collections import Counter

import pytest

from rollmill.tasks.observe.loop_lag import Beat, LoopLag
from rollmill.tasks.observe.loop_monitor import (
    ELSEWHERE,
    MIN_JUDGED_BEATS,
    MOST_SITES,
    NO_PROCESSOR,
    GarbageTimer,
    LoopMonitor,
)
from rollmill.tasks.observe.stack_sites import StallSampler

STALL_S = 0.4
DEADLINE_S = 60.0
SITE = "task the culprit (score) in tasks/score/planted.py:3 score"
COMPUTED = Beat(600.0, running_ms=590.0, queued_ms=2.0)
WAITED = Beat(600.0, running_ms=4.0, queued_ms=2.0)
WITHOUT_CPU = Beat(600.0, running_ms=20.0, queued_ms=570.0)


def make_monitor() -> tuple[list[str], LoopMonitor]:
    said: list[str] = []
    return said, LoopMonitor(max_stall_ms=500.0, max_lag_p99_ms=0.0, warn=said.append)


async def test_a_stall_of_the_running_loop_is_in_the_metrics_and_a_report_resets_them() -> None:
    said: asyncio.Queue[str] = asyncio.Queue()
    monitor = LoopMonitor(max_stall_ms=100.0, max_lag_p99_ms=0.0, warn=said.put_nowait)
    with monitor.watch():
        await asyncio.sleep(0)
        time.sleep(STALL_S)  # noqa: ASYNC251 - that is the stall
        warning = await asyncio.wait_for(said.get(), DEADLINE_S)
        values = {metric.name: metric.value for metric in monitor.report()}
        assert not monitor.report()
    assert values["loop/lag_max_ms"] >= 1000 * STALL_S * 0.9
    assert values["loop/lag_p50_ms"] <= values["loop/lag_p90_ms"] <= values["loop/lag_p99_ms"]
    assert values["loop/stalls"] >= 1
    assert warning.startswith("event loop blocked for")


async def test_without_diagnostics_no_thread_is_started() -> None:
    before = set(threading.enumerate())
    with make_monitor()[1].watch():
        assert set(threading.enumerate()) == before


def test_a_stall_without_samples_names_the_setting_that_shows_the_code() -> None:
    said, monitor = make_monitor()
    for beat in (COMPUTED, WAITED, WITHOUT_CPU) * 2:
        monitor.record(beat)
    computed, waited = said
    assert "590 ms running" in computed
    assert "worker processes" in computed
    assert "594 ms waiting, in a call or for the GIL" in waited
    assert "await it in a thread" not in waited
    assert all("observe.diagnostics: true" in text for text in (computed, waited))


def test_a_loop_that_waits_for_a_cpu_is_counted_and_a_step_of_it_is_reported() -> None:
    said: list[str] = []
    monitor = LoopMonitor(max_stall_ms=500.0, max_lag_p99_ms=100.0, warn=said.append)
    monitor.record(WITHOUT_CPU)
    assert not said
    monitor._lag.lags.add(10.0 * MIN_JUDGED_BEATS, 10.0)
    values = {metric.name: metric.value for metric in monitor.report()}
    assert values["loop/stalls"] == 1
    (text,) = said
    assert NO_PROCESSOR in text
    # The own part of a delay counts alone.
    monitor.record(Beat(1100.0, running_ms=590.0, queued_ms=505.0))
    assert "590 ms running" in said[1]


def test_a_sampled_stall_names_its_code_once_and_all_are_counted() -> None:
    said, monitor = make_monitor()
    for _ in range(2):
        monitor.record(COMPUTED, Counter({SITE: 11, "a callback in x.py:1 f": 1}))
    (text,) = said
    assert "(limit 500): 590 ms running, " in text
    assert f"; {SITE}; " in text
    assert "observe.diagnostics" not in text


def test_a_call_that_blocks_has_another_remedy_than_work_and_than_a_thread_that_holds_the_interpreter() -> (
    None
):
    for beat, n_samples, words in (
        (COMPUTED, 12, "worker processes"),
        (WAITED, 12, "await it in a thread"),
        (WAITED, 2, "waiting, in a call or for the GIL"),
    ):
        said, monitor = make_monitor()
        monitor.record(beat, Counter({SITE: n_samples}))
        assert words in said[0]


async def test_a_step_names_the_sites_with_most_of_its_lag_and_forgets_them_for_the_next() -> None:
    said: list[str] = []
    monitor = LoopMonitor(max_stall_ms=0.0, max_lag_p99_ms=1e-9, warn=said.append)
    with monitor.watch():
        monitor._lag.lags.add(1000.0 * MIN_JUDGED_BEATS, 1.0)
        for number in range(2 * MOST_SITES):
            monitor.record(Beat(60.0 + number, 50.0, 0.0), Counter({f"site {number}": 1}))
        while not said:
            await asyncio.sleep(0.02)
            monitor.report()
        assert ELSEWHERE in said[0]
        assert "0.1 s site 49" in said[0]
        assert monitor._sites_s == {}


@pytest.mark.parametrize(("n_beats", "is_judged"), [(MIN_JUDGED_BEATS - 1, False), (MIN_JUDGED_BEATS, True)])
async def test_the_p99_is_reported_only_for_a_step_of_many_beats(n_beats: int, is_judged: bool) -> None:
    said: list[str] = []
    monitor = LoopMonitor(max_stall_ms=0.0, max_lag_p99_ms=100.0, warn=said.append)
    with monitor.watch():
        monitor._lag.lags.add(10.0 * n_beats, 10.0)
        assert monitor.report()
    assert bool(said) is is_judged


async def test_a_sampling_thread_sees_the_task_that_holds_the_loop_and_its_code() -> None:
    lag = LoopLag(0.001)
    sampler = StallSampler(lag, 0.003)
    seen: Counter[str] = Counter()

    async def hold_the_loop() -> None:
        until = time.monotonic() + DEADLINE_S
        # On a busy machine a sample may come late, and see what ran before.
        while not any("hold_the_loop" in site for site in seen) and time.monotonic() < until:
            time.sleep(0.01)  # noqa: ASYNC251 - that is the stall
            seen.update(sampler.take())

    with lag.sample(), sampler.sample():
        await asyncio.create_task(hold_the_loop(), name="the culprit")
    assert any(site.startswith("task the culprit (") and "hold_the_loop" in site for site in seen)
    assert any("test_loop.py" in site for site in seen)


async def test_a_thread_that_holds_the_interpreter_keeps_samples_from_being_taken() -> None:
    lag = LoopLag(0.001)
    sampler = StallSampler(lag, 0.01)
    keeps_the_lock = ctypes.PyDLL(None).usleep  # as a library that computes without giving it back
    with lag.sample(), sampler.sample():
        sampler.take()
        keeps_the_lock(int(1e6 * STALL_S))
        n_samples = sampler.take().total()
    assert n_samples * 0.01 < STALL_S / 2


def test_pauses_of_the_garbage_collector_are_counted_and_taken() -> None:
    pauses = GarbageTimer()
    with pauses.measure():
        gc.collect()
    gc.collect()
    total_s, longest_s = pauses.take()
    assert 0.0 < longest_s <= total_s
    assert pauses.take() == (0.0, 0.0)


def test_garbage_collected_during_a_stall_is_in_its_warning() -> None:
    said, monitor = make_monitor()
    monitor.record(COMPUTED)
    monitor._garbage.totals_s = (0.12, 0.12)
    monitor.record(WAITED)
    assert "garbage" not in said[0]
    assert "120 ms of it collecting garbage" in said[1]


@pytest.mark.parametrize("late_ms", [0.0, 499.0])
def test_a_beat_within_the_bound_is_no_stall(late_ms: float) -> None:
    said, monitor = make_monitor()
    monitor.record(Beat(late_ms, 0.0, 0.0))
    assert not said
