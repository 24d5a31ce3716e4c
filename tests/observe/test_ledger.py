"""What is made of spans: owners that add up, causes of waits, the critical path, what would shorten a step."""

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from span_rows import BEGAN, Row, spans_of, whole_step

from rollmill.tasks.look.ledger.balance import Balance, measure_balance
from rollmill.tasks.look.ledger.span_timeline import build_timeline
from rollmill.tasks.look.ledger.step_attribution import Ledger, build_ledger

SERVER, OTHER_SERVER = "http://10.0.0.1:8000", "http://10.0.0.2:8000"
START_US = int(BEGAN.timestamp() * 1e6)


def seconds(ledger: Ledger, process: str, step: int = 0) -> dict[tuple[str, str], float]:
    """A process's seconds by (name, cause)."""
    rows = ledger.owners.filter((pl.col("process") == process) & (pl.col("step") == step))
    return {(row["name"], row["cause"]): row["us"] / 1e6 for row in rows.to_dicts()}


def path(ledger: Ledger, step: int = 0) -> list[tuple[float, float, str, str]]:
    """Its segments as (start, end, process or lane of a trajectory, name), in seconds."""
    rows = ledger.path.filter(pl.col("step") == step).to_dicts()
    return [
        (
            (row["start"] - START_US) / 1e6,
            (row["end"] - START_US) / 1e6,
            row["lane"] if row["process"] == "flow" else row["process"],
            row["name"],
        )
        for row in rows
    ]


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=12))
def test_the_span_of_a_lane_that_started_last_owns_an_instant(
    intervals: list[tuple[int, int]],
) -> None:
    rows = (
        spans_of(
            *(
                (0, "p", "main", str(at), start * 1e-6, (start + n) * 1e-6)
                for at, (start, n) in enumerate(intervals)
            )
        )
        if intervals
        else spans_of((0, "p", "main", "0", 0, 0))
    )
    timeline = build_timeline(rows)
    owned = {
        instant: timeline.spans.row(span, named=True)
        for span, start, end in zip(
            timeline.pieces.span,
            timeline.pieces.start - START_US,
            timeline.pieces.end - START_US,
            strict=True,
        )
        for instant in range(start, end)
    }
    for instant in range(45):
        open_ones = [(start, -n) for start, n in intervals if start <= instant < start + n]
        if not open_ones:
            assert instant not in owned
            continue
        owner = owned[instant]
        assert (owner["start"] - START_US, owner["start"] - owner["end"]) == max(open_ones)


def test_every_process_has_every_microsecond_of_a_step_once() -> None:
    ledger = build_ledger(spans_of(*whole_step(0), *whole_step(1, began=10)))
    sums = ledger.owners.group_by("step", "process").agg(pl.col("us").sum())
    assert len(sums) == 2 * 4
    assert set(sums["us"]) == {10_000_000}


def test_what_no_span_owns_is_unattributed_and_never_idle() -> None:
    ledger = build_ledger(spans_of(*whole_step(0), *whole_step(1, began=10)))
    assert seconds(ledger, "trainer/1")["unattributed", ""] == pytest.approx(1.2)
    assert seconds(ledger, "flow")["unattributed", ""] == pytest.approx(0.4)


def test_an_idle_rank_or_server_has_what_the_step_does_meanwhile_as_its_cause() -> None:
    ledger = build_ledger(spans_of(*whole_step()))
    trainer = seconds(ledger, "trainer/0")
    assert trainer["idle", "generating"] == pytest.approx(3.5)
    assert trainer["idle", "waiting_for_stragglers"] == pytest.approx(2.0)
    assert trainer["idle", "storing"] == pytest.approx(0.7)
    server = seconds(ledger, SERVER)
    assert server["idle", "forward"] == pytest.approx(2.3)
    assert server["idle", "waiting_for_server"] == pytest.approx(0.5)


def test_a_server_that_waits_for_another_names_it() -> None:
    rows: list[Row] = [
        (0, "flow", "step", "step", 0, 2),
        (0, "flow", "step", "collect", 0, 2),
        (0, "flow", "0.0", "generating", 0, 2, OTHER_SERVER),
        (0, OTHER_SERVER, "main", "generating", 0, 2),
        (0, SERVER, "main", "idle", 0, 2),
    ]
    assert seconds(build_ledger(spans_of(*rows)), SERVER) == {("idle", f"generating at {OTHER_SERVER}"): 2.0}


def test_the_critical_path_includes_the_holder_of_the_slot_and_the_slow_rank() -> None:
    assert path(build_ledger(spans_of(*whole_step()))) == [
        (0, 0.5, "0.0", "waiting_for_server"),
        (0.5, 3, "0.0", "generating"),
        (3, 4, "0.1", "generating"),
        (4, 5.5, "0.1", "generating"),  # from here on as a straggler
        (5.5, 5.9, "0.1", "scoring"),
        (5.9, 6, "step", "waiting_for_stragglers"),
        (6, 6.1, "step", "unattributed"),
        (6.1, 6.2, "step", "train"),
        (6.2, 8.5, "trainer/1", "forward"),
        (8.5, 8.9, "trainer/0", "optimizer"),
        (8.9, 9, "step", "train"),
        (9, 9.2, "step", "unattributed"),
        (9.2, 9.9, "step", "storing"),
        (9.9, 10, "step", "unattributed"),
    ]


def ranks_step(*rows: Row) -> list[Row]:
    """A step that is nothing but the ranks' training, up to the end of the last of these."""
    end = max(row[3] for row in rows)
    return [(0, "flow", "step", "train", 0, end), *((0, process, "main", *rest) for process, *rest in rows)]


def test_a_rank_that_others_waited_for_is_on_the_path_though_nobody_has_its_last_moment() -> None:
    rows = ranks_step(
        ("trainer/0", "reading_batch", 0, 2.9),
        ("trainer/1", "waiting_for_rank", 0, 3, "trainer/0"),
        ("trainer/1", "reading_batch", 3, 4),
    )
    assert path(build_ledger(spans_of(*rows))) == [
        (0, 2.9, "trainer/0", "reading_batch"),
        (2.9, 3, "trainer/1", "waiting_for_rank"),
        (3, 4, "trainer/1", "reading_batch"),
    ]


def test_where_the_awaited_rank_waits_too_the_critical_path_continues_in_the_rank_that_works() -> None:
    rows = ranks_step(
        ("trainer/0", "forward", 0, 1),
        ("trainer/0", "waiting_for_rank", 1, 5, "trainer/1"),
        ("trainer/0", "optimizer", 5, 6),
        ("trainer/1", "forward", 0, 2),
        ("trainer/1", "waiting_for_rank", 2, 5, "trainer/2"),
        ("trainer/2", "forward", 0, 5),
    )
    assert path(build_ledger(spans_of(*rows))) == [
        (0, 5, "trainer/2", "forward"),
        (5, 6, "trainer/0", "optimizer"),
    ]


def test_ranks_recorded_as_waiting_for_each_other_do_not_hang_the_walk() -> None:
    rows = ranks_step(
        ("trainer/0", "waiting_for_rank", 0, 2, "trainer/1"),
        ("trainer/1", "waiting_for_rank", 0, 2, "trainer/0"),
    )
    ((start, end, _, name),) = path(build_ledger(spans_of(*rows)))
    assert (start, end, name) == (0, 2, "waiting_for_rank")


RANKS = 3
LAPS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 20), min_size=RANKS, max_size=RANKS, unique=True),
        st.lists(st.integers(0, 3), min_size=RANKS, max_size=RANKS),
    ),
    min_size=1,
    max_size=6,
)
"""Of laps, each before a collective: [RANKS] work, in units of 4 us, and microseconds after it that nobody has."""


@settings(max_examples=40)
@given(LAPS)
def test_between_two_collectives_the_path_is_the_slowest_ranks(
    laps: list[tuple[list[int], list[int]]],
) -> None:
    rows, expected, began = list[Row](), dict[int, str](), 0
    for works, pauses in laps:
        slow = works.index(max(works))
        until = began + 4 * works[slow] + pauses[slow]
        for rank, (work, pause) in enumerate(zip(works, pauses, strict=True)):
            worked = began + 4 * work
            rows.append((f"trainer/{rank}", "forward", began * 1e-6, worked * 1e-6))
            if rank != slow:
                wait = "waiting_for_rank", (worked + pause) * 1e-6, until * 1e-6, f"trainer/{slow}"
                rows.append((f"trainer/{rank}", *wait))
        expected |= dict.fromkeys(range(began, began + 4 * works[slow]), f"trainer/{slow}")
        began = until
    rows.append(("trainer/0", "optimizer", began * 1e-6, (began + 1) * 1e-6))
    forwards = build_ledger(spans_of(*ranks_step(*rows))).path.filter(pl.col("name") == "forward").to_dicts()
    walked = {
        instant - START_US: row["process"] for row in forwards for instant in range(row["start"], row["end"])
    }
    assert walked == expected


def test_the_path_of_a_sync_goes_over_what_servers_take_and_the_trainer_sends_but_not_over_their_generating() -> (
    None
):
    rows: list[Row] = [
        (0, "flow", "step", "step", 0, 4),
        (0, "flow", "step", "sync", 0, 4),
        (0, "trainer/0", "main", "gathering", 0, 1),
        (0, "trainer/0", "main", "sending", 1, 3),
        (1, SERVER, "main", "generating", 0, 2),
        (0, SERVER, "main", "receiving", 2, 3.5),
        (0, SERVER, "main", "switching", 3.5, 3.9),
        (1, SERVER, "main", "generating", 3.9, 4),
    ]
    ledger = build_ledger(spans_of(*rows))
    assert path(ledger) == [
        (0, 1, "trainer/0", "gathering"),
        (1, 2, "trainer/0", "sending"),
        (2, 3.5, SERVER, "receiving"),
        (3.5, 3.9, SERVER, "switching"),
        (3.9, 4, "step", "sync"),
    ]


def test_the_path_goes_from_a_group_to_its_last_trajectory_and_from_that_to_the_groups_problem() -> None:
    rows: list[Row] = [
        (0, "flow", "step", "step", 0, 10),
        (0, "flow", "step", "collect", 0, 10),
        (0, "flow", "collect.0", "planning", 0, 1),
        (0, "flow", "7", "collecting", 1, 10),
        (0, "flow", "7", "environment", 1, 2),
        (0, "flow", "7", "storing", 9, 10),
        (0, "flow", "7.0", "generating", 2, 8, SERVER),
        (0, "flow", "7.1", "generating", 2, 9, SERVER),
        (0, "flow", "8", "collecting", 1, 9.5),
        (0, "flow", "8.0", "generating", 2, 8.5, SERVER),
    ]
    assert path(build_ledger(spans_of(*rows))) == [
        (0, 1, "collect.0", "planning"),
        (1, 2, "7", "environment"),
        (2, 9, "7.1", "generating"),
        (9, 10, "7", "storing"),
    ]


def test_a_rank_with_a_clock_slightly_ahead_is_the_cause_of_the_wait() -> None:
    rows: list[Row] = [
        (0, "flow", "step", "step", 0, 2),
        (0, "flow", "step", "train", 0, 2),
        (0, "trainer/0", "main", "forward", 0.5, 2.0004),
    ]
    assert path(build_ledger(spans_of(*rows))) == [
        (0, 0.5, "step", "train"),
        (0.5, 2, "trainer/0", "forward"),
    ]


def make_overlapping_steps() -> list[Row]:
    """Two steps with max_staleness 1: the server generates for step 1 while step 0 is trained."""
    return [
        (0, "flow", "step", "step", 0, 5),
        (0, "flow", "step", "collect", 0, 2),
        (0, "flow", "step", "train", 2, 5),
        (1, "flow", "step", "step", 5, 9),
        (1, "flow", "step", "collect", 5, 6),
        (1, "flow", "step", "train", 6, 9),
        (0, "flow", "0.0", "generating", 0, 2, SERVER),
        (1, "flow", "1.0", "generating", 2, 6, SERVER),
        (0, SERVER, "main", "generating", 0, 2),
        (1, SERVER, "main", "generating", 2, 6),
        (2, SERVER, "main", "idle", 6, 9),
        (0, "trainer/0", "main", "idle", 0, 2),
        (0, "trainer/0", "main", "forward", 2, 5),
        (1, "trainer/0", "main", "idle", 5, 6),
        (1, "trainer/0", "main", "forward", 6, 9),
    ]


def test_where_steps_overlap_every_second_has_one_owner() -> None:
    owners = build_ledger(spans_of(*make_overlapping_steps())).owners.filter(pl.col("process") == SERVER)
    assert owners.select("step", "name", "is_other", pl.col("us") / 1e6).rows() == [
        (0, "generating", True, 3.0),
        (0, "generating", False, 2.0),
        (1, "idle", False, 3.0),
        (1, "generating", False, 1.0),
    ]


def test_where_steps_overlap_rollouts_that_are_waited_for_are_on_the_path_from_their_beginning() -> None:
    ledger = build_ledger(spans_of(*make_overlapping_steps()))
    assert path(ledger, step=1) == [(5, 6, "1.0", "generating"), (6, 9, "trainer/0", "forward")]
    assert path(ledger, step=0) == [(0, 2, "0.0", "generating"), (2, 5, "1.0", "generating")], (
        "training was not what the second step waited for"
    )


def test_rollouts_that_were_over_before_they_were_waited_for_are_not_on_the_path_but_training_is() -> None:
    early = [(*row[:5], 4, *row[6:]) if row[2] == "1.0" else row for row in make_overlapping_steps()]
    ledger = build_ledger(spans_of(*early))
    assert path(ledger, step=0) == [(0, 2, "0.0", "generating"), (2, 5, "trainer/0", "forward")]
    assert path(ledger, step=1) == [(5, 6, "step", "collect"), (6, 9, "trainer/0", "forward")]


def test_an_evaluation_that_ended_before_the_wait_is_not_on_the_path() -> None:
    rows: list[Row] = [
        (0, "flow", "step", "step", 0, 9),
        (0, "flow", "step", "train", 0, 8),
        (0, "flow", "step", "evaluate", 8, 8.5),
        (0, "flow", "evaluate.0/0", "sampling", 0, 3),
        (0, "flow", "v0.0.greedy", "generating", 0, 3, SERVER),
        (0, "trainer/0", "main", "forward", 0, 8),
    ]
    train, rest = (0, 8, "trainer/0", "forward"), (8.5, 9, "step", "unattributed")
    assert path(build_ledger(spans_of(*rows))) == [train, (8, 8.5, "step", "evaluate"), rest]


def test_a_trainer_that_is_started_again_in_the_midst_of_training_is_on_the_path() -> None:
    rows: list[Row] = [
        (0, "flow", "step", "step", 0, 20),
        (0, "flow", "step", "train", 0, 20),
        (0, "trainer/0", "main", "idle", -3, 0),
        (0, "trainer/0", "process", "starting", 4, 15, "restart"),
        (-1, "trainer/0", "main", "idle", 14, 16),
        (0, "trainer/0", "main", "forward", 16, 20),
    ]
    assert path(build_ledger(spans_of(*rows))) == [
        (0, 4, "step", "train"),
        (4, 15, "trainer/0", "starting"),
        (15, 16, "step", "train"),
        (16, 20, "trainer/0", "forward"),
    ]


def test_a_group_starts_after_the_one_before_and_time_without_an_owner_is_the_rollouts() -> None:
    rows: list[Row] = [
        (0, "flow", "step", "step", 0, 4),
        (0, "flow", "step", "storing", 0, 2),
        (0, "flow", "step", "collect", 2, 4),
        (0, "flow", "collect.0", "planning", 0, 0.5),
        (0, "flow", "7", "recording", 0.5, 1),
        (0, "flow", "7.0", "generating", 1, 1.75, SERVER),
        (0, "flow", "8", "recording", 1.5, 2.5),
        (0, "flow", "8.0", "generating", 2.5, 4, SERVER),
    ]
    assert path(build_ledger(spans_of(*rows))) == [
        (0, 0.5, "collect.0", "planning"),
        (0.5, 1, "7", "recording"),
        (1, 1.5, "collect.", "collect"),
        (1.5, 2, "8", "recording"),
        (2, 2.5, "8", "recording"),
        (2.5, 4, "8.0", "generating"),
    ]


def test_a_step_that_was_tried_again_has_the_seconds_of_the_attempt_that_finished_it() -> None:
    dead: list[Row] = [(0, "flow", "step", "collect", -100, -97), (0, "flow", "0.0", "generating", -100, -97)]
    ledger = build_ledger(spans_of(*dead, *whole_step()))
    assert ledger.steps["us"].to_list() == [10_000_000]


def test_an_open_step_lasts_from_its_first_span_to_its_last() -> None:
    open_step = [row for row in whole_step(1, began=10) if row[3] != "step"]
    ledger = build_ledger(spans_of(*whole_step(0), *open_step))
    assert ledger.steps["us"].to_list() == [10_000_000, 9_900_000]


def test_several_lanes_of_a_process_are_one_line_in_which_work_precedes_waits() -> None:
    rows: list[Row] = [
        (0, "flow", "step", "step", 0, 6),
        (0, "trainer/0", "main", "idle", 0, 4),
        (0, "trainer/0", "main", "forward", 4, 6),
        (0, "trainer/0", "checkpoint", "checkpointing", 1, 5),
    ]
    owned = seconds(build_ledger(spans_of(*rows)), "trainer/0")
    assert owned == {("checkpointing", ""): 3.0, ("forward", ""): 2.0, ("idle", "unattributed"): 1.0}


def test_only_the_requested_steps_are_in_the_ledger() -> None:
    rows = spans_of(*whole_step(0), *whole_step(1, began=10))
    assert build_ledger(rows, [1]).steps["step"].to_list() == [1]


def test_time_before_and_after_the_steps_has_owners_that_add_up() -> None:
    rows: list[Row] = [
        (0, "flow", "main", "start", -10, 0),
        (0, "flow", "main", "launching", -10, -4),
        (0, "flow", "main", "starting", -8, -5, "Prefect"),
        (0, "flow", "main", "restore", -3, 0),
        *whole_step(),
        (0, "flow", "main", "recording", 4, 5),  # of a step, concurrent with it
        (0, "flow", "main", "end", 10, 14),
        (0, "flow", "main", "report", 10, 13.9),
        (0, "flow", "main", "recording", 11, 13),
    ]
    ends = build_ledger(spans_of(*rows)).ends
    assert ends.rows() == [
        ("start", "launching", "", 3_000_000),
        ("start", "restore", "", 3_000_000),
        ("start", "starting", "Prefect", 3_000_000),
        ("start", "unattributed", "", 1_000_000),
        ("end", "recording", "", 2_000_000),
        ("end", "report", "", 1_900_000),
        ("end", "unattributed", "", 100_000),
    ]


def test_the_balance_says_how_many_servers_would_be_even() -> None:
    balance = measure_balance(build_ledger(spans_of(*whole_step())))
    assert balance is not None
    assert (balance.generation_s, balance.training_s) == pytest.approx((5.0, 1.9))
    assert balance.hint == (
        "generation takes 2.6 times as long as training: 2 more servers would make them even; "
        "the busiest rank works 1.4 times as long as the mean one"
    )
    assert Balance(2.0, 6.0, 3, 1, is_overlapping=True).hint == (
        "training takes 3.0 times as long as generation: 2 more ranks would make them even, and 2 servers could go"
    )
    assert measure_balance(build_ledger(spans_of((0, "flow", "step", "step", 0, 1)))) is None
