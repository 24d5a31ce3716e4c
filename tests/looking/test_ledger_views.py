"""The tables of a ledger: what adds up, and over which steps, ranks and servers it is a mean."""

import json
from collections.abc import Callable

import pytest
from span_rows import Row, spans_of, whole_step
from stored_spans import store_spans

from rollmill.tasks.look.ledger.step_attribution import Ledger, build_ledger
from rollmill.tasks.look.tables.ledger_tables import (
    _limit_shown,
    make_ledger_views,
    processes,
    slowest,
    step_line,
)
from rollmill.tasks.store.folders import RunFolder

SERVER, OTHER_SERVER, THIRD_SERVER = (f"http://10.0.0.{n}:8000" for n in (1, 2, 3))


def step(number: int, began: float, seconds: float, *servers: tuple[str, float]) -> list[Row]:
    """A step that collects all the time; of each server the seconds that it generates, to be idle for the rest."""
    end = began + seconds
    rows: list[Row] = [(number, "flow", "step", name, began, end) for name in ("step", "collect")]
    for server, busy in servers:
        rows += [
            (number, server, "main", "generating", began, began + busy),
            (number, server, "main", "idle", began + busy, end),
        ]
    return rows


def of(ledger: Ledger, name: str) -> dict[str, object]:
    (row,) = (row for row in processes(ledger) if row["name"] == name)
    return row


def ledger(*steps: list[Row]) -> Ledger:
    return build_ledger(spans_of(*(row for rows in steps for row in rows)))


def test_rows_add_up_to_the_mean_step_and_to_all_of_it() -> None:
    found = ledger(whole_step(0), step(1, 10, 1), step(2, 11, 1))
    first = make_ledger_views("run", found)[0]
    assert first.notes[-1] == "longest: step 0, 10.00 s, 83% of all steps"
    assert first.title == "run, mean of 3 steps: 4.00 s (median 1.00 s), by what decided it"
    line = step_line(found)
    assert sum(float(str(row["seconds"])) for row in line) == pytest.approx(4.0)
    assert sum(float(str(row["share"])) for row in line) == pytest.approx(1.0)
    assert all(float(str(row["seconds"])) == pytest.approx(4.0 * float(str(row["share"]))) for row in line)


def test_servers_that_were_never_there_together_are_not_added_up() -> None:
    found = ledger(step(0, 0, 10, (SERVER, 4)), step(1, 10, 10, (OTHER_SERVER, 8)))
    assert of(found, "generating") == {
        "process": "server",
        "name": "generating",
        "cause": "",
        "seconds": 6.0,
        "share": 0.6,
        "most": 6.0,
        "spread": 0.0,
        "by": OTHER_SERVER,
    }
    assert sum(float(str(row["share"])) for row in processes(found)) == pytest.approx(1.0)
    assert slowest(found) == []


def test_a_server_that_joins_later_is_part_of_the_mean_from_then_on() -> None:
    found = ledger(step(0, 0, 10, (SERVER, 4)), step(1, 10, 10, (SERVER, 4), (OTHER_SERVER, 8)))
    row = of(found, "generating")
    assert row["process"] == "1 to 2 servers"
    assert (row["seconds"], row["share"]) == (5.0, 0.5)
    assert (row["most"], row["spread"]) == (6.0, 2.0)
    assert sum(float(str(row["share"])) for row in processes(found)) == pytest.approx(1.0)
    assert slowest(found) == [
        f"busiest server: {OTHER_SERVER}, 8.00 s of a step, 4.00 s more than the least busy"
    ]


def test_a_row_that_one_of_several_lacks_has_its_whole_value_as_spread() -> None:
    found = ledger(step(0, 0, 10, (SERVER, 4), (OTHER_SERVER, 0)))
    row = of(found, "generating")
    assert (row["process"], row["seconds"], row["most"], row["spread"]) == ("2 servers", 2.0, 4.0, 4.0)
    assert slowest(found) == [f"busiest server: {SERVER}, 4.00 s of a step, 4.00 s more than the least busy"]


def test_servers_are_compared_within_the_steps_that_they_share() -> None:
    found = ledger(
        step(0, 0, 10, (SERVER, 9), (OTHER_SERVER, 8)), step(1, 10, 10, (OTHER_SERVER, 1), (THIRD_SERVER, 3))
    )
    assert slowest(found) == [f"busiest server: {SERVER}, 9.00 s of a step, 1.00 s more than the least busy"]


def test_steps_without_any_of_a_kind_do_not_count_in_its_means() -> None:
    found = ledger(step(0, 0, 10), step(1, 10, 20, (SERVER, 5)))
    row = of(found, "generating")
    assert (row["seconds"], row["share"]) == (5.0, 0.25)


def test_json_says_how_many_there_were_in_each_step(
    rollmill: Callable[..., str], timed_run: RunFolder
) -> None:
    store_spans(timed_run, "5eed5eed5eed5eed", *step(3, 30, 2, (SERVER, 1)))
    values = json.loads(rollmill("spans", timed_run.location, "--json"))
    assert (values["step_s"], values["median_step_s"]) == (8.0, 10.0)
    assert values["steps"][-2:] == [
        {"step": 2, "seconds": 10.0, "n_servers": 1, "n_ranks": 2},
        {"step": 3, "seconds": 2.0, "n_servers": 1, "n_ranks": 0},
    ]


def test_what_no_span_owns_is_a_row_however_little_it_is_but_not_where_it_is_nothing() -> None:
    for view in make_ledger_views("run", ledger(step(0, 0, 10, (SERVER, 4)))):
        assert "unattributed" not in [row.get("name") for row in view.rows]
    rows = [(0, "flow", "step", "step", 0, 10), (0, "flow", "step", "collect", 0, 9.97)]
    rows += [(0, "flow", "step", "sync", 9.97, 9.99)]
    first = make_ledger_views("run", ledger(rows))[0].rows
    assert [(row["name"], round(float(str(row["seconds"])), 3)) for row in first] == [
        ("collect", 9.97),
        ("unattributed", 0.01),
        ("(others)", 0.02),
    ]


def test_what_no_span_owns_is_one_row_whatever_the_path_did_meanwhile() -> None:
    rows = [
        {"name": "unattributed", "cause": cause, "seconds": 1.0, "share": 0.1} for cause in ("", "collect")
    ]
    shown = _limit_shown([*rows, {"name": "collect", "cause": "", "seconds": 8.0, "share": 0.8}])
    assert [(row["name"], row["cause"], row["seconds"]) for row in shown] == [
        ("collect", "", 8.0),
        ("unattributed", "", 2.0),
    ]


def test_others_of_zero_seconds_are_no_row() -> None:
    rows = [(0, "flow", "step", "step", 0, 10), (0, "flow", "step", "collect", 0, 9.9998)]
    names = [
        row["name"]
        for row in make_ledger_views("run", ledger([*rows, (0, "flow", "step", "sync", 9.9998, 10)]))[0].rows
    ]
    assert names == ["collect"]
