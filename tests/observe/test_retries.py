"""What sending again leaves behind: nothing but the answer, or the last error."""

import pytest

from tasks.observe.retries import retries
from tasks.observe.spans import Recorder, recording


async def asked(n_failures: int) -> int:
    """Ask what fails this often, three times at most; returns how often it was asked."""
    n_asked = 0
    async for attempt in retries(OSError, attempts=3, backoff_s=0.001, longest_s=0.001):
        with attempt:
            n_asked += 1
            if n_asked <= n_failures:
                raise OSError(f"failure {n_asked}")
    return n_asked


async def test_an_attempt_follows_a_transient_error() -> None:
    assert await asked(n_failures=2) == 3


async def test_the_last_attempt_raises() -> None:
    with pytest.raises(OSError, match="failure 3"):
        await asked(n_failures=3)


async def test_nothing_is_logged_of_an_attempt(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        await asked(n_failures=1)
    assert not [each for each in caplog.records if each.name != "asyncio"]


async def test_the_waits_between_attempts_are_spans_with_the_error_as_cause() -> None:
    recorder = Recorder("flow")
    with recording(recorder):
        await asked(n_failures=2)
    spans = recorder.take()
    assert [(each.name, each.cause) for each in spans] == [("waiting_to_retry", "OSError")] * 2
