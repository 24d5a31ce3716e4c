"""The handoff benchmark reports the median of its passes, and the worst."""

from benchmarks.handoff import median_and_worst


def test_one_bad_pass_is_the_worst_and_not_the_median() -> None:
    passes = [{"lag_excess_ms": 3.0}, {"lag_excess_ms": 174.0}, {"lag_excess_ms": 4.0}]
    median, worst = median_and_worst(passes)
    assert median == {"lag_excess_ms": 4.0}
    assert worst == {"lag_excess_ms": 174.0}
