"""What is said of late beats: once of each cause, with what to do."""

from tasks.observe.lag import Beat
from tasks.observe.lag_warnings import NO_PROCESSOR, LagWarnings

OURS, OTHERS = Beat(600.0, 590.0, 5.0), Beat(600.0, 20.0, 570.0)


def told() -> tuple[list[str], LagWarnings]:
    said: list[str] = []
    return said, LagWarnings(max_stall_ms=500.0, max_lag_p99_ms=100.0, warn=said.append)


def test_a_busy_machine_is_told_of_once() -> None:
    said, warnings = told()
    for _ in range(2):
        warnings.of_stall(OTHERS, NO_PROCESSOR, 0.0)
        warnings.of_step(300.0, OTHERS, {NO_PROCESSOR: 0.6})
    (text,) = said
    assert "570 ms waiting for a processor" in text
    assert "give the flow a core" in text


def test_a_step_on_a_busy_machine_is_told_of_in_the_place_of_its_stalls() -> None:
    said, warnings = told()
    warnings.of_step(300.0, OTHERS, {NO_PROCESSOR: 0.6})
    warnings.of_stall(OTHERS, NO_PROCESSOR, 0.0)
    (text,) = said
    assert "0.6 s other threads or processes had all processors" in text


def test_our_own_work_is_told_of_on_a_busy_machine_too() -> None:
    said, warnings = told()
    warnings.of_stall(OTHERS, NO_PROCESSOR, 0.0)
    warnings.of_stall(OURS, "in a scorer", 120.0)
    warnings.of_step(300.0, OURS, {"in a scorer": 0.6})
    assert ["in a scorer" in text for text in said] == [False, True, True]
    assert "120 ms of it collecting garbage" in said[1]
    assert "score.workers" in said[1]
    assert "observe.task_runs" in said[2]


def test_a_step_is_told_of_once_and_one_within_the_bound_not_at_all() -> None:
    said, warnings = told()
    warnings.of_step(100.0, OURS, {})
    assert not said
    warnings.of_step(101.0, OURS, {})
    warnings.of_step(900.0, OURS, {})
    assert len(said) == 1
