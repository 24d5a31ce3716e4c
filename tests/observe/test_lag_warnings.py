"""Warnings of late beats: one for each cause, with a remedy."""

from rollmill.tasks.observe.loop_lag import Beat
from rollmill.tasks.observe.loop_monitor import MOST_STEP_WARNINGS, NO_PROCESSOR, LagWarnings

OURS, OTHERS = Beat(600.0, 590.0, 5.0), Beat(600.0, 20.0, 570.0)


def record_warnings() -> tuple[list[str], LagWarnings]:
    messages: list[str] = []
    return messages, LagWarnings(max_stall_ms=500.0, max_lag_p99_ms=100.0, warn=messages.append)


def test_a_busy_machine_is_reported_once() -> None:
    messages, warnings = record_warnings()
    for _ in range(2):
        warnings.warn_of_stall(OTHERS, NO_PROCESSOR, 0.0)
        warnings.warn_of_step(300.0, OTHERS, {NO_PROCESSOR: 0.6})
    (text,) = messages
    assert "570 ms waiting for a CPU" in text
    assert "reserve a core for the flow" in text


def test_a_step_on_a_busy_machine_is_reported_instead_of_its_stalls() -> None:
    messages, warnings = record_warnings()
    warnings.warn_of_step(300.0, OTHERS, {NO_PROCESSOR: 0.6})
    warnings.warn_of_stall(OTHERS, NO_PROCESSOR, 0.0)
    (text,) = messages
    assert "other threads or processes used all CPUs; reserve a core" in text


def test_the_flows_own_work_is_reported_on_a_busy_machine_too() -> None:
    messages, warnings = record_warnings()
    warnings.warn_of_stall(OTHERS, NO_PROCESSOR, 0.0)
    warnings.warn_of_stall(OURS, "in a scorer", 120.0)
    warnings.warn_of_step(300.0, OURS, {"in a scorer": 0.6})
    assert ["in a scorer" in text for text in messages] == [False, True, True]
    assert "120 ms of it collecting garbage" in messages[1]
    assert "score.workers" in messages[1]
    assert "observe.task_runs" in messages[2]


def test_a_warning_names_the_largest_part_of_the_lag_first_and_what_the_step_was_doing() -> None:
    late = Beat(432.0, 42.0, 186.0)
    messages, warnings = record_warnings()
    warnings.warn_of_stall(late, "", 0.0, "train")
    warnings.warn_of_step(128.0, late, {"": 0.3, NO_PROCESSOR: 0.1}, "collect")
    parts = "204 ms waiting, in a call or for the GIL, 186 ms waiting for a CPU, 42 ms running"
    assert messages == [
        f"event loop blocked for 432 ms during train (limit 500): {parts}; observe.diagnostics: true names the code",
        f"event loop lag 128 ms during collect (p99; limit 100): {parts}; observe.diagnostics: true names the code",
    ]


def test_a_step_within_the_bound_is_not_reported() -> None:
    messages, warnings = record_warnings()
    warnings.warn_of_step(100.0, OURS, {})
    assert not messages


def test_steps_that_the_flows_own_work_delays_are_reported_after_those_of_a_busy_machine() -> None:
    messages, warnings = record_warnings()
    warnings.warn_of_step(101.0, OTHERS, {NO_PROCESSOR: 0.6})
    warnings.warn_of_step(9000.0, OURS, {"in a scorer": 9.0})
    assert ["9000 ms" in text for text in messages] == [False, True]


def test_a_step_is_reported_again_when_its_lag_grows_by_50_percent() -> None:
    messages, warnings = record_warnings()
    for p99_ms in (200.0, 290.0, 310.0, 330.0):
        warnings.warn_of_step(p99_ms, OURS, {"in a scorer": 0.6})
    assert [text.split()[3] for text in messages] == ["200", "310"]


def test_a_step_is_reported_again_when_it_is_late_in_another_place() -> None:
    messages, warnings = record_warnings()
    for task, place in enumerate(["part.py:40 score, a.py:1 b", "part.py:41 score", "play.py:7 step"]):
        warnings.warn_of_step(200.0, OURS, {f"task Task-{task} (work) in {place}": 0.6})
    assert ["play.py" in text for text in messages] == [False, True]


def test_the_number_of_reported_places_is_limited() -> None:
    messages, warnings = record_warnings()
    for number in range(10 * MOST_STEP_WARNINGS):
        warnings.warn_of_step(200.0, OURS, {f"place {number}": 0.6})
    assert len(messages) == MOST_STEP_WARNINGS


def test_a_stall_in_a_place_is_reported_once_for_all_tasks() -> None:
    messages, warnings = record_warnings()
    for task in range(3):
        warnings.warn_of_stall(OURS, f"task Task-{task} (work) in part.py:40 score", 0.0)
    assert len(messages) == 1


def test_a_beat_is_blocked_while_others_can_look_and_its_thread_does_not_run() -> None:
    waited = Beat(700.0, 3.0, 2.0)
    assert waited.with_blocked(13, 0.05).blocked_ms == 695.0
    assert waited.with_blocked(2, 0.05) == waited
    assert not Beat(700.0, 690.0, 2.0).with_blocked(13, 0.05).is_blocked
    assert not Beat(700.0, 0.0, 0.0).with_blocked(13, 0.05).is_blocked  # nothing is known of it
