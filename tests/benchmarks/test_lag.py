"""What the benchmark of the event loop's lag makes of its passes."""

import time

import pytest

from benchmarks.lag import ALONE, BASE64, HAND_OFF, BeatCpu, excess, loop_cpu_s
from rollmill.tasks.observe.loop_lag import Beat

MEDIAN = {
    ALONE: {"lag_p99_ms": 1.0, "lag_max_ms": 4.0, "loop_cpu_s": 0.6, "seconds": 3.0},
    HAND_OFF: {"lag_p99_ms": 15.0, "lag_max_ms": 30.0, "loop_cpu_s": 1.1, "seconds": 2.0},
    BASE64: {"lag_p99_ms": 21.0, "lag_max_ms": 44.0, "loop_cpu_s": 1.5, "seconds": 4.0},
}


def test_excess_is_above_the_tasks_alone_by_each_form() -> None:
    assert excess(MEDIAN, HAND_OFF) == {"lag_p99_excess_ms": 14.0, "lag_max_excess_ms": 26.0}
    assert excess(MEDIAN, BASE64, "_base64") == {
        "lag_p99_excess_base64_ms": 20.0,
        "lag_max_excess_base64_ms": 40.0,
    }


def test_the_cpu_of_the_hand_off_excludes_that_of_the_tasks() -> None:
    assert loop_cpu_s(MEDIAN) == pytest.approx(1.1 - 0.2 * 2.0)


def test_the_cpu_of_the_latest_beat_is_kept() -> None:
    cpu = BeatCpu()
    until = time.thread_time() + 0.02
    while time.thread_time() < until:
        pass
    cpu.heard(Beat(30.0, 0.0, 0.0))
    latest_ms = cpu.largest_ms
    cpu.heard(Beat(10.0, 0.0, 0.0))
    assert cpu.largest_ms == latest_ms >= 20.0
