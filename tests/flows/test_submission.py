"""It is known how soon after a decision, and how far apart, those who were called began."""

import pytest

from rollmill.flows.run.submission import Submission
from rollmill.tasks.observe.metrics import Metric
from rollmill.tasks.observe.spans import Recorder, Span, recording

DECIDED_NS = 1_700_000_000_000_000_000
MS = 1_000_000


def submit(**starts_ms: int) -> Submission:
    """A decision, and how many ms later each began."""
    submission = Submission("servers", DECIDED_NS)
    for who, start_ms in starts_ms.items():
        submission.note_start(who, DECIDED_NS + start_ms * MS)
    return submission


def test_metrics_are_the_last_start_since_the_decision_and_the_skew_of_all_starts() -> None:
    assert submit(b=50, a=20, c=30).metrics("submit/") == [
        Metric("submit/last_start_s", "all", "value", pytest.approx(0.05)),
        Metric("submit/skew_s", "all", "value", pytest.approx(0.03)),
    ]


def test_the_first_start_of_a_server_counts() -> None:
    submission = submit(a=20)
    submission.note_start("a", DECIDED_NS + 900 * MS)
    assert (submission.n_started, submission.last_start_s) == (1, pytest.approx(0.02))


def test_the_time_until_the_last_start_is_a_span_of_the_step_that_decided() -> None:
    recorder = Recorder("flow")
    with recording(recorder, step=3, lane="step"):
        submission = submit(a=20, b=50)
    submission.book()  # also where another lane is the current one, or none
    booked = Span("flow", "submitting servers", "submitting", 3, DECIDED_NS, 50 * MS)
    assert list(recorder.take()) == [booked]


def test_without_a_start_nothing_is_recorded() -> None:
    recorder = Recorder("flow")
    with recording(recorder):
        submission = submit()
        submission.book()
    assert not submission.metrics()
    assert not recorder.take()
