"""Control calls go out together, and it is known how soon and how far apart those who were called began."""

import asyncio
from functools import partial

import pytest

from flows.running.submission import AT_ONCE, Submission, together
from tasks.observe.metrics import Metric
from tasks.observe.spans import Recorder, Span, recording

DECIDED_NS = 1_700_000_000_000_000_000
MS = 1_000_000


class Calls:
    """Calls that are over when they are let; counts those under way."""

    def __init__(self) -> None:
        self.under_way = self.most_under_way = 0

    async def call(self, number: int) -> int:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        for _ in range(AT_ONCE):  # turns of the loop, in which all others that may begin do
            await asyncio.sleep(0)
        self.under_way -= 1
        return number


@pytest.mark.parametrize(("n", "at_once", "most"), [(16, AT_ONCE, 16), (64, AT_ONCE, 64), (16, 4, 4)])
async def test_calls_are_under_way_at_once_up_to_a_bound_and_answer_in_their_order(
    n: int, at_once: int, most: int
) -> None:
    calls = Calls()
    answers = await together([partial(calls.call, number) for number in range(n)], at_once)
    assert calls.most_under_way == most
    assert answers == list(range(n))


async def test_the_first_call_that_fails_ends_the_others() -> None:
    ended = asyncio.Event()

    async def goes_on() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def fails() -> None:
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        async with asyncio.timeout(30.0):
            await together([goes_on, fails])
    assert ended.is_set()


def submitted(**starts_ms: int) -> Submission:
    """A decision, and how many ms later each began."""
    submission = Submission("servers", DECIDED_NS)
    for who, start_ms in starts_ms.items():
        submission.started(who, DECIDED_NS + start_ms * MS)
    return submission


def test_metrics_are_the_last_start_since_the_decision_and_the_skew_of_all_starts() -> None:
    assert submitted(b=50, a=20, c=30).metrics("submit/") == [
        Metric("submit/last_start_s", "all", "value", pytest.approx(0.05)),
        Metric("submit/skew_s", "all", "value", pytest.approx(0.03)),
    ]


def test_one_that_begins_again_began_when_it_did_first() -> None:
    submission = submitted(a=20)
    submission.started("a", DECIDED_NS + 900 * MS)
    assert (submission.n_started, submission.last_start_s) == (1, pytest.approx(0.02))


def test_the_time_until_the_last_start_is_a_span_of_the_step_that_decided() -> None:
    recorder = Recorder("flow")
    with recording(recorder, step=3, lane="step"):
        submission = submitted(a=20, b=50)
    submission.book()  # also where another lane is the current one, or none
    booked = Span("flow", "submitting servers", "submitting", 3, DECIDED_NS, 50 * MS)
    assert list(recorder.take()) == [booked]


def test_where_none_began_nothing_is_told() -> None:
    recorder = Recorder("flow")
    with recording(recorder):
        submission = submitted()
        submission.book()
    assert not submission.metrics()
    assert not recorder.take()
