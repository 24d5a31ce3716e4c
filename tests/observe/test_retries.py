"""What sending again leaves behind: nothing but the answer, or the last error."""

import asyncio
import gc
from collections.abc import Iterator

import pytest

from rollmill.tasks.observe.retries import Retries
from rollmill.tasks.observe.spans import Recorder, recording

FAILURES = [OSError(f"failure {n}") for n in (1, 2, 3)]


def attempts(n: int = 3) -> Retries:
    """So many attempts at what raises OSError."""
    return Retries(OSError, attempts=n, backoff_s=0.001, longest_s=0.001)


def raise_next(errors: Iterator[BaseException]) -> int:
    """Fail with the next error; 1 when there is none left."""
    for error in errors:
        raise error
    return 1


async def ask(*errors: BaseException, n: int = 3) -> int:
    """Ask what fails with these errors, in turn; returns how many answers came."""
    failing, n_answers = iter(errors), 0
    async for attempt in attempts(n):
        with attempt:
            n_answers += raise_next(failing)
    return n_answers


def ask_in_a_thread(*errors: BaseException) -> int:
    """The same without an event loop."""
    failing, n_answers = iter(errors), 0
    for attempt in attempts():
        with attempt:
            n_answers += raise_next(failing)
    return n_answers


@pytest.mark.parametrize("n_failures", [0, 1, 2])
async def test_an_attempt_follows_a_transient_error_and_none_an_answer(n_failures: int) -> None:
    assert await ask(*FAILURES[:n_failures]) == 1
    assert ask_in_a_thread(*FAILURES[:n_failures]) == 1


async def test_the_last_attempt_raises() -> None:
    with pytest.raises(OSError, match="failure 3"):
        await ask(*FAILURES)
    with pytest.raises(OSError, match="failure 3"):
        ask_in_a_thread(*FAILURES)
    with pytest.raises(OSError, match="failure 1"):
        await ask(*FAILURES, n=1)


@pytest.mark.parametrize("error", [LookupError, asyncio.CancelledError])
async def test_any_other_error_is_raised_at_once(error: type[BaseException]) -> None:
    with pytest.raises(error):
        await ask(error(), *FAILURES)
    with pytest.raises(error):
        ask_in_a_thread(error(), *FAILURES)


def test_a_first_attempt_that_succeeds_leaves_nothing_to_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    # What earlier tests left in cycles does not count.
    gc.freeze()
    try:
        for _ in range(100):
            ask_in_a_thread()
        assert gc.collect() < 100
    finally:
        gc.unfreeze()
        gc.enable()


async def test_nothing_is_logged_of_an_attempt(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        await ask(*FAILURES[:1])
    assert not [each for each in caplog.records if each.name != "asyncio"]


async def test_the_waits_between_attempts_are_spans_with_the_error_as_cause() -> None:
    recorder = Recorder("flow")
    with recording(recorder):
        await ask(*FAILURES[:2])
    spans = recorder.take()
    assert [(each.name, each.cause) for each in spans] == [("waiting_to_retry", "OSError")] * 2
