"""Whose seconds a step has: of processes that come and go, of attempts, of a trajectory and its group."""

import polars as pl
import pytest
from span_rows import Row, spans_of, whole_step

from rollmill.tasks.look.ledger.step_attribution import Ledger, build_ledger

SERVER, OTHER_SERVER = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


def seconds(ledger: Ledger, process: str, step: int) -> dict[str, float]:
    """A process's seconds of a step by name, with `, other step` behind it where they served one."""
    rows = ledger.owners.filter(process=process, step=step).to_dicts()
    return {row["name"] + ", other step" * row["is_other"]: row["us"] / 1e6 for row in rows}


def line(step: int, start: float, end: float) -> list[Row]:
    """A step that collects from its beginning to its end."""
    return [(step, "flow", "step", "step", start, end), (step, "flow", "step", "collect", start, end)]


def start(step: int, began: float, ended: float) -> Row:
    """The span with which a process of the flow begins, up to this step."""
    return (step, "flow", "main", "start", began, ended)


def generate(step: int, server: str, start: float, end: float) -> Row:
    return (step, server, "requests of flow", "generating", start, end)


def make_resumed_run() -> list[Row]:
    """Step 1 is cancelled after 3 s and done again in 8 s by a further process, with a server of another address."""
    return [
        start(0, -5, 0),
        *line(0, 0, 10),
        *line(1, 10, 13),
        (0, "trainer/0", "main", "forward", 0, 9),  # what it did after that was never recorded
        generate(0, SERVER, 0, 13),
        start(1, 100, 120),
        *line(1, 120, 128),
        (1, "trainer/0", "main", "loading", 110, 118),
        (1, "trainer/0", "main", "forward", 118, 128),
        generate(1, OTHER_SERVER, 119, 128),
    ]


def test_a_step_that_was_cancelled_has_the_seconds_of_the_attempt_that_finished_it() -> None:
    ledger = build_ledger(spans_of(*make_resumed_run()))
    assert ledger.steps.rows() == [(0, 10_000_000), (1, 8_000_000)]
    assert seconds(ledger, "trainer/0", 1) == {"forward": 8.0}


def test_a_server_counts_in_the_steps_in_which_it_was_there() -> None:
    ledger = build_ledger(spans_of(*make_resumed_run()))
    assert ledger.there.rows() == [(0, 1, 1), (1, 1, 1)]
    servers = ledger.owners.filter(pl.col("process").str.starts_with("http"))
    assert servers.select("step", "process", "name", "us").rows() == [
        (0, SERVER, "generating", 10_000_000),
        (1, OTHER_SERVER, "generating", 8_000_000),
    ]


def test_the_last_unrecorded_work_of_a_rank_is_not_unattributed_time() -> None:
    assert seconds(build_ledger(spans_of(*make_resumed_run())), "trainer/0", 0) == {
        "forward": 9.0,
        "no_spans": 1.0,
    }


def test_of_a_cancelled_attempt_and_one_in_progress_the_later_one_counts() -> None:
    in_progress = [row for row in make_resumed_run() if row[3] != "step" or row[4] != 120]
    assert build_ledger(spans_of(*in_progress)).steps["us"].to_list() == [10_000_000, 8_000_000]


def test_a_process_restarted_within_a_step_is_starting_and_its_last_work_was_never_recorded() -> None:
    rows = [*line(0, 0, 20), (0, "trainer/0", "main", "forward", 0, 4), generate(0, SERVER, 0, 7)]
    for process in ("trainer/0", SERVER):
        rows += [
            (-1, process, "process", "starting", 7, 15, "restart"),
            (0, process, "main", "loading", 16, 20),
        ]
    ledger = build_ledger(spans_of(*rows))
    new_life = {"starting": 8.0, "loading": 4.0, "unattributed": 1.0}
    assert seconds(ledger, "trainer/0", 0) == {"forward": 4.0, "no_spans": 3.0} | new_life
    assert seconds(ledger, SERVER, 0) == {"generating": 7.0} | new_life


def test_spans_of_a_server_during_and_after_its_restart_add_up_to_the_step() -> None:
    rows = [*line(0, 0, 20), (0, SERVER, "requests of flow", "idle", 0, 20)]
    rows.append((-1, SERVER, "process", "starting", 7, 15, "restart"))
    assert seconds(build_ledger(spans_of(*rows)), SERVER, 0) == {"idle": 12.0, "starting": 8.0}


def test_a_server_that_joins_late_has_no_spans_before_it_joins() -> None:
    rows = [*line(0, 0, 10), *line(1, 10, 20), *line(2, 20, 30)]
    rows += [generate(0, SERVER, 0, 30), generate(1, OTHER_SERVER, 14, 30)]
    ledger = build_ledger(spans_of(*rows))
    assert ledger.there.rows() == [(0, 1, 0), (1, 2, 0), (2, 2, 0)]
    assert seconds(ledger, OTHER_SERVER, 0) == {}
    assert seconds(ledger, OTHER_SERVER, 1) == {"generating": 6.0, "no_spans": 4.0}


def test_a_gap_between_spans_is_unattributed_however_long() -> None:
    rows = [*line(0, 0, 10), generate(0, SERVER, 0, 1), generate(0, SERVER, 8, 10)]
    assert seconds(build_ledger(spans_of(*rows)), SERVER, 0) == {"unattributed": 7.0, "generating": 3.0}


def test_a_step_without_ranks_or_servers_has_none() -> None:
    assert build_ledger(spans_of(*line(0, 0, 1))).there.rows() == [(0, 0, 0)]


def test_work_for_another_step_is_labelled() -> None:
    rows = [*line(0, 0, 2), *line(1, 2, 6)]
    rows += [(0, SERVER, "main", "parity", 1, 3), (1, SERVER, "main", "generating", 3, 6)]
    ledger = build_ledger(spans_of(*rows))
    assert seconds(ledger, SERVER, 1) == {"parity, other step": 1.0, "generating": 3.0}


@pytest.mark.parametrize("lanes", [("main", "weights"), ("weights", "main")])
def test_among_lanes_of_a_process_work_takes_precedence_over_a_wait_and_a_wait_over_idling(
    lanes: tuple[str, str],
) -> None:
    one, other = lanes
    rows = [*line(0, 0, 7)]
    rows += [(0, SERVER, one, "idle", 0, 2), (0, SERVER, one, "waiting_for_trainer", 2, 7)]
    rows += [(0, SERVER, other, "waiting_for_lock", 1, 2), (0, SERVER, other, "generating", 4, 5)]
    owned = seconds(build_ledger(spans_of(*rows)), SERVER, 0)
    assert owned == {"idle": 1.0, "waiting_for_lock": 1.0, "waiting_for_trainer": 4.0, "generating": 1.0}


def trajectory(ledger: Ledger, lane: str) -> dict[str, float]:
    rows = ledger.trajectories.filter(lane=lane).to_dicts()
    return {row["name"]: row["us"] / 1e6 for row in rows}


def test_waits_and_scoring_of_a_group_count_for_each_of_its_trajectories() -> None:
    rows: list[Row] = [
        *line(0, 0, 12),
        (0, "flow", "7", "waiting_for_server", 0, 5, "slot"),
        (0, "flow", "7", "recording", 5, 9.25),
        (0, "flow", "7", "sampling", 5.5, 9),
        (0, "flow", "7.0", "generating", 5.5, 6.5),
        (0, "flow", "7.1", "waiting_for_server", 5.5, 6),
        (0, "flow", "7.1", "generating", 6, 9),
        (0, "flow", "7", "scoring", 9.25, 11.25),
        (0, "flow", "7.0", "waiting_for_scorer", 9.25, 9.5),
        (0, "flow", "7", "storing", 11.25, 12),
        (0, "flow", "7/reference", "recomputing", 9, 11),
        (0, "flow", "8", "waiting_for_server", 0, 11, "slot"),
    ]
    ledger = build_ledger(spans_of(*rows))
    of_group = {"recording": 0.75, "storing": 0.75}
    assert trajectory(ledger, "7.0") == of_group | {
        "waiting_for_server": 5.0,
        "generating": 1.0,
        "waiting_for_scorer": 0.25,
        "scoring": 1.75,
    }
    assert trajectory(ledger, "7.1") == of_group | {
        "waiting_for_server": 5.5,
        "generating": 3.0,
        "scoring": 2.0,
    }
    ends = ledger.trajectories.group_by("lane").agg(pl.col("end").unique().alias("end")).sort("lane")
    assert [len(each) for each in ends["end"]] == [1, 1]
    assert ends["end"][0][0] - ends["end"][1][0] == 500_000


def test_a_wait_of_a_part_of_a_group_counts_for_the_trajectories_of_that_part() -> None:
    rows = [*line(0, 0, 9), (0, "flow", "7", "waiting_for_server", 0, 1, "slot")]
    for part, (began, sample) in enumerate([(1.0, 0), (4.0, 1)]):
        rows += [
            (0, "flow", f"7/{part}", "waiting_for_server", 1, began, "slot"),
            (0, "flow", f"7/{part}", "sampling", began, began + 2),
            (0, "flow", f"7.{sample}", "generating", began, began + 2),
        ]
    ledger = build_ledger(spans_of(*rows))
    assert trajectory(ledger, "7.0") == {"waiting_for_server": 1.0, "generating": 2.0}
    assert trajectory(ledger, "7.1") == {"waiting_for_server": 4.0, "generating": 2.0}


def test_several_scorers_that_look_at_a_trajectory_at_once_share_its_time() -> None:
    rows: list[Row] = [
        *line(0, 0, 9),
        (0, "flow", "7.0", "generating", 0, 2),
        (0, "flow", "7.0/one", "scoring", 2, 5),
        (0, "flow", "7.0/other", "scoring", 3, 6),
    ]
    ledger = build_ledger(spans_of(*rows))
    assert trajectory(ledger, "7.0") == {"generating": 2.0, "scoring": 4.0}
    assert ledger.trajectories["lane"].unique().to_list() == ["7.0"]


def test_a_restarted_trajectory_has_its_last_attempt_and_a_finished_one_its_first() -> None:
    rows: list[Row] = [
        start(0, -1, 0),
        *line(0, 0, 3),
        (0, "flow", "7", "waiting_for_server", 0, 1),
        (0, "flow", "7.0", "generating", 1, 3),
        (0, "flow", "7.1", "generating", 1, 2),
        start(0, 10, 11),
        *line(0, 11, 16),
        (0, "flow", "7", "waiting_for_server", 11, 11.5),
        (0, "flow", "7.0", "generating", 11.5, 16),
    ]
    ledger = build_ledger(spans_of(*rows))
    assert trajectory(ledger, "7.0") == {"waiting_for_server": 0.5, "generating": 4.5}
    assert trajectory(ledger, "7.1") == {"waiting_for_server": 1.0, "generating": 1.0}


def test_trajectories_of_steps_that_are_not_asked_for_are_left_out() -> None:
    rows = spans_of(*whole_step(0), *whole_step(1, began=10))
    assert set(build_ledger(rows, [1]).trajectories["lane"]) == {"1.0", "1.1"}
