"""The monitor of an event loop finds what is planted, and names it."""

import asyncio
import ctypes
import gc
import time

import pytest

from tasks.observe.garbage import GarbagePauses
from tasks.observe.loop import LoopMonitor

STALL_S = 0.4
SETTLE_S = 0.05
ATTEMPTS = 10


async def block_the_loop(seconds: float = STALL_S) -> None:
    time.sleep(seconds)  # noqa: ASYNC251 - that is the stall


async def stalled(said: list[str], n: int = 1) -> dict[str, float]:
    """Plant stalls under a monitor; returns its metrics by name."""
    monitor = LoopMonitor(max_stall_ms=100.0, max_lag_p99_ms=50.0, warn=said.append)
    with monitor.watching():
        await asyncio.sleep(SETTLE_S)
        for _ in range(n):
            await asyncio.create_task(block_the_loop(), name="the culprit")
            await asyncio.sleep(SETTLE_S)
    return {metric.name: metric.value for metric in monitor.report()}


async def told(*words: str) -> str:
    """What is said of a stall with these words in it; where others have all processors a stall may be laid to them."""
    said: list[str] = []
    for _ in range(ATTEMPTS):
        await stalled(said)
        if found := [text for text in said if all(each in text for each in words)]:
            return found[0]
    raise AssertionError(f"expected {words}, was told {said}")


async def test_a_stall_is_warned_of_with_its_task_and_its_place() -> None:
    stall = await told("stood still", "the culprit")
    assert "task the culprit (block_the_loop)" in stall
    assert "test_loop.py" in stall
    assert "observe.max_stall_ms is 100" in stall


async def test_a_call_that_blocks_is_told_from_work_with_how_to_mend_it() -> None:
    for words in ("stood still", "p99 of a step"):
        assert "await it in a thread" in await told(words, "ms blocked in a call")


async def test_a_loop_that_waits_for_the_interpreter_is_not_called_blocked() -> None:
    said: list[str] = []
    keeps_the_lock = ctypes.PyDLL(None).usleep  # as a library that computes without giving it back
    with LoopMonitor(max_stall_ms=100.0, max_lag_p99_ms=0.0, warn=said.append).watching():
        await asyncio.sleep(SETTLE_S)
        for _ in range(ATTEMPTS):
            await asyncio.to_thread(keeps_the_lock, int(1e6 * STALL_S))
            await asyncio.sleep(SETTLE_S)
            if any("for the interpreter's lock" in text for text in said):
                break
    assert any("waiting otherwise, for the interpreter's lock above all" in text for text in said)
    assert not any("blocked in a call" in text for text in said)


async def test_a_place_is_told_once_and_its_stalls_are_counted() -> None:
    said: list[str] = []
    values = await stalled(said, n=2)
    assert values["loop/stalls"] >= 2
    assert sum("block_the_loop" in text and "stood still" in text for text in said) == 1


async def test_what_a_step_had_is_in_its_metrics() -> None:
    values = await stalled([])
    assert values["loop/lag_max_ms"] >= 1000 * STALL_S * 0.9
    assert values["loop/lag_p50_ms"] <= values["loop/lag_p90_ms"] <= values["loop/lag_p99_ms"]
    assert await told("p99 of a step", "block_the_loop")


async def test_a_report_begins_anew() -> None:
    monitor = LoopMonitor(0.0, 0.0, warn=pytest.fail)
    with monitor.watching():
        await asyncio.sleep(SETTLE_S)
        await block_the_loop(1.0)
        await asyncio.sleep(SETTLE_S)
        first = {metric.name: metric.value for metric in monitor.report()}
        await asyncio.sleep(SETTLE_S)
        second = {metric.name: metric.value for metric in monitor.report()}
    assert second["loop/lag_max_ms"] < first["loop/lag_max_ms"]


def test_pauses_of_the_garbage_collector_are_counted_and_taken() -> None:
    pauses = GarbagePauses()
    with pauses.counted():
        gc.collect()
    gc.collect()
    taken = pauses.take()
    assert 0.0 < taken.longest_s <= taken.total_s
    assert pauses.take().total_s == 0.0
