"""Whose seconds are whose: spans of tasks side by side, of steps that overlap, of locks and of idle servers."""

import asyncio
import time
from collections.abc import Sequence
from datetime import timedelta

import pytest

from rollmill.tasks.observe import spans
from rollmill.tasks.observe.span_waits import TimedLock
from rollmill.tasks.observe.spans import Recorder, Span, current_lane, recording, span, within
from rollmill.tasks.observe.step_clock import StepClock
from rollmill.tasks.serve.server_pool import Occupancy
from rollmill.tasks.store.span_rows import rows_by_step

PLANTED_S = 0.5
TURNS = 10
"""Of the event loop, after which every task waits for another one, or for the clock."""


class Clock:
    """The value of `time.perf_counter_ns` in a test: it changes only by `advance`."""

    def __init__(self) -> None:
        self.now_ns = 0

    def advance(self, planted_s: float) -> None:
        self.now_ns += round(1e9 * planted_s)

    async def sleep(self, planted_s: float) -> None:
        """Let all others come as far as they can, and then the time pass."""
        for _ in range(TURNS):
            await asyncio.sleep(0)
        self.advance(planted_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: clock.now_ns)
    return clock


def seconds(taken: Sequence[Span], name: str, cause: str = "") -> float:
    return sum(each.duration_ns for each in taken if (each.name, each.cause) == (name, cause)) / 1e9


def ends(each: Span) -> int:
    return each.started_ns + each.duration_ns


async def test_concurrent_tasks_have_separate_lanes_and_nested_spans_are_within_the_outer_one() -> None:
    recorder = Recorder("flow")

    async def work(name: str) -> None:
        with within(lane=name), span("outer"):
            await asyncio.sleep(0)
            with span("inner"):
                await asyncio.sleep(0)

    with recording(recorder, step=3):
        await asyncio.gather(*(work(f"7.{sample}") for sample in range(4)))
    taken = recorder.take()
    for sample in range(4):
        inner, outer = (each for each in taken if each.lane == f"7.{sample}")
        assert (inner.name, outer.name, inner.step) == ("inner", "outer", 3)
        assert outer.started_ns <= inner.started_ns
        assert ends(inner) <= ends(outer)


def test_spans_before_the_first_step_and_after_the_last_are_within_a_start_and_an_end(clock: Clock) -> None:
    recorder = Recorder("flow")
    with recording(recorder):
        with span("restore"):
            clock.advance(PLANTED_S)
        for step in range(2):
            with StepClock(step):
                pass
        with span("report"):
            clock.advance(PLANTED_S)
    recorder.end()
    taken = {each.name: each for each in recorder.take() if each.name != "step"}
    for whole, inner in (("start", "restore"), ("end", "report")):
        assert {taken[name].lane for name in (whole, inner)} == {"main"}
        assert taken[whole].started_ns <= taken[inner].started_ns
        assert ends(taken[inner]) <= ends(taken[whole])
        assert taken[whole].duration_ns == 1e9 * PLANTED_S


def test_a_run_without_a_step_is_all_start() -> None:
    recorder = Recorder("flow")
    recorder.end()
    assert [each.name for each in recorder.take()] == ["start"]


async def test_a_task_belongs_to_the_step_it_was_started_for_while_another_step_is_open() -> None:
    recorder = Recorder("flow")
    may_continue = asyncio.Event()

    async def rollouts(step: int) -> None:
        with within(step=step, lane=f"collect.{step}"):
            await may_continue.wait()
            with span("sampling"):
                await asyncio.sleep(0)

    with recording(recorder):
        with StepClock(0):
            ahead = asyncio.create_task(rollouts(1))
            await asyncio.sleep(0)
            may_continue.set()
            with span("train"):
                await ahead
        with StepClock(1), span("train"):
            pass
    found = [(each.step, each.lane, each.name) for each in recorder.take()]
    assert found == [
        (-1, "main", "start"),
        (1, "collect.1", "sampling"),
        (0, "step", "train"),
        (0, "step", "step"),
        (1, "step", "train"),
        (1, "step", "step"),
    ]


async def test_a_wait_for_a_lock_is_booked_to_what_its_holder_does_from_moment_to_moment(
    clock: Clock,
) -> None:
    recorder, lock = Recorder("flow"), TimedLock()
    is_held = asyncio.Event()

    async def hold() -> None:
        with within(lane="holder"), span("sync"):
            async with lock:
                is_held.set()
                await clock.sleep(PLANTED_S)
                with span("sending"):
                    await clock.sleep(2 * PLANTED_S)

    async def wait(lane: str, then_s: float) -> None:
        with within(lane=lane), span("checkpoint"):
            await is_held.wait()
            async with lock:
                with span("exporting"):
                    await clock.sleep(then_s)

    with recording(recorder):
        await asyncio.gather(hold(), wait("first", PLANTED_S), wait("second", 0.0))
    taken = recorder.take()
    by_lane = {lane: [each for each in taken if each.lane == lane] for lane in ("first", "second", "holder")}
    assert seconds(by_lane["first"], "waiting_for_lock", "sync") == PLANTED_S
    assert seconds(by_lane["first"], "waiting_for_lock", "sending") == 2 * PLANTED_S
    assert seconds(by_lane["second"], "waiting_for_lock", "sending") == 2 * PLANTED_S
    assert seconds(by_lane["second"], "waiting_for_lock", "exporting") == PLANTED_S
    assert not [each for each in by_lane["holder"] if each.name == "waiting_for_lock"]


async def test_a_lock_without_a_wait_has_no_span_and_works_where_nobody_records() -> None:
    recorder, lock = Recorder("flow"), TimedLock()
    with recording(recorder):
        async with lock:
            pass
    assert not recorder.take()
    async with lock:
        assert current_lane() is None


async def test_a_server_is_idle_for_what_the_step_does_and_its_open_span_is_cut_when_spans_are_taken(
    clock: Clock,
) -> None:
    recorder, admitted = Recorder("flow"), {"http://a"}
    with recording(recorder):
        occupancy = Occupancy("http://a", recorder, lambda: "http://a" in admitted)
        with StepClock(0) as step:
            with step.span("collect"):
                occupancy.begin_request()
                await clock.sleep(PLANTED_S)
                first = recorder.take()
                await clock.sleep(PLANTED_S)
                occupancy.end_request()
            with step.span("train"):
                await clock.sleep(PLANTED_S)
                admitted.clear()
                occupancy.look()
                await clock.sleep(PLANTED_S)
    second = recorder.take()
    assert seconds(first, "generating") == PLANTED_S
    of_server = [each for each in second if each.process == "http://a"]
    assert seconds(of_server, "generating") == PLANTED_S
    assert seconds(of_server, "idle", "train") == PLANTED_S
    assert seconds(of_server, "idle", "not in the pool") == PLANTED_S
    assert step.seconds["train"] == 2 * PLANTED_S


def test_spans_that_nobody_takes_are_bounded_and_what_is_lost_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spans, "MOST_SPANS", 3)
    recorder = Recorder("flow")
    with recording(recorder):
        for name in "abcde":
            with span(name):
                pass
    assert recorder.n_lost == 2
    assert [each.name for each in recorder.take()] == ["c", "d", "e"]


def test_rows_keep_nesting_and_spans_of_no_step_belong_to_the_open_one() -> None:
    now = time.time_ns() // 1000 * 1000
    found = [
        Span("flow", "step", "train", 4, now + 999, 3001),
        Span("flow", "step", "storing", 4, now + 1999, 2001),
        Span("http://a", "requests of flow", "idle", -1, now, 10_000, "train"),
    ]
    by_step = rows_by_step("ab", found, 5)
    assert list(by_step) == [4, 5]
    outer, inner = by_step[4].to_pylist()
    assert inner["started_at"] - outer["started_at"] == timedelta(microseconds=1)
    assert (outer["duration_s"], inner["duration_s"]) == (4e-6, 3e-6)
    assert by_step[5].to_pylist()[0]["cause"] == "train"
