"""What the benchmark `failures` says of kills, on timelines whose costs are known."""

import random

import polars as pl
import pytest

from benchmarks.failures import count_lost
from benchmarks.kills.accounting import (
    Kill,
    StepSeconds,
    calm_ratio,
    effective_share,
    kill_costs,
    mean_by_role,
    modelled_share,
    peer_costs,
)
from benchmarks.kills.managed_run import Moment
from benchmarks.kills.roles import ROLES, Deck

# Steps of 1 s, but each tenth of 3 s: 12 s for ten.
SECONDS = {step: 3.0 if step % 10 == 0 else 1.0 for step in range(200)}


def timeline(first: int, last: int, delays: dict[int, float]) -> list[Moment]:
    """Steps that end one after another from 100 s on, some of them later by a delay."""
    at_s, moments = 100.0, [Moment(first, 100.0)]
    for step in range(first + 1, last + 1):
        at_s += SECONDS[step] + delays.get(step, 0.0)
        moments.append(Moment(step, at_s))
    return moments


USEFUL = StepSeconds(timeline(19, 79, {}), 10)


def test_a_run_without_kills_is_all_useful_whichever_steps_it_has() -> None:
    assert USEFUL.mean == pytest.approx(1.2)
    assert effective_share(timeline(19, 87, {}), USEFUL) == pytest.approx(1.0)


def test_a_kill_costs_what_its_steps_take_longer_and_the_share_is_what_remains() -> None:
    steps = timeline(19, 49, {25: 8.0, 35: 16.0})
    kills = [Kill("flow", steps[5].at_s + 0.5), Kill("server", steps[15].at_s + 0.5)]
    assert kill_costs(steps, kills, USEFUL) == pytest.approx([8.0, 16.0])
    assert effective_share(steps, USEFUL) == pytest.approx(36 / 60)
    assert modelled_share(12.0, 30.0) == pytest.approx(36 / 60)


def test_a_step_that_a_killed_flow_did_not_report_is_useful_all_the_same() -> None:
    steps = [each for each in timeline(19, 49, {25: 8.0}) if each.step != 25]
    assert effective_share(steps, USEFUL) == pytest.approx(36 / 44)
    assert kill_costs(steps, [Kill("flow", steps[5].at_s + 0.5)], USEFUL) == pytest.approx([8.0])


def test_a_kill_that_another_one_follows_within_its_steps_has_no_cost() -> None:
    steps = timeline(19, 49, {25: 8.0})
    kills = [
        Kill("flow", steps[5].at_s + 0.5),
        Kill("S3", steps[5].at_s + 2.0),
        Kill("scorer", steps[-1].at_s),
    ]
    costs = kill_costs(steps, kills, USEFUL)
    assert costs == [None, pytest.approx(8.0), None]
    assert mean_by_role(kills, costs) == {"S3": pytest.approx(8.0)}


def test_steps_that_no_kill_touched_show_how_loaded_the_machine_is() -> None:
    steps = [Moment(each.step, 2.0 * each.at_s) for each in timeline(19, 49, {25: 8.0})]
    kills = [Kill("flow", steps[5].at_s + 0.5)]
    assert calm_ratio(steps, kills, USEFUL) == pytest.approx(2.0)
    assert kill_costs(steps, kills, USEFUL.times(2.0)) == pytest.approx([16.0])
    assert calm_ratio(steps[:3], kills, USEFUL) == 1.0


def test_a_peer_loses_the_restart_the_open_step_and_the_steps_since_its_checkpoint() -> None:
    steps = timeline(19, 49, {})
    at_s = next(each.at_s for each in steps if each.step == 32)
    kills = [Kill("server", at_s + 0.5), Kill("environment", at_s + 1.0), Kill("Prefect server", at_s + 2.0)]
    # Steps 30 (3 s), 31 and 32 are repeated; step 33 was half done.
    costs = peer_costs(steps, kills, USEFUL, checkpoint_every=10, restart_s=30.0, others={"environment": 2.0})
    assert costs == pytest.approx([30.0 + 5.0 + 0.5, 2.0, 0.0])


def test_each_role_comes_once_before_one_comes_again() -> None:
    deck = Deck(random.Random(0))
    for _ in range(3):
        assert sorted(deck.draw() for _ in ROLES) == sorted(ROLES)


def test_rows_that_changed_are_gone_or_doubled_are_lost() -> None:
    names = ["trajectory_id", "started_at", "generate_s"]

    def frame(*rows: tuple[str, int, float]) -> pl.DataFrame:
        return pl.DataFrame(rows, schema=names, orient="row")

    stored = [frame(("a", 0, 1.0), ("b", 0, 2.0)), frame(("b", 0, 2.0), ("c", 5, 4.0))]
    kept = [("a", 0, 1.0), ("b", 0, 2.0), ("c", 5, 4.0), ("d", 9, 8.0)]
    assert count_lost(frame(*kept), stored) == 0.0
    assert count_lost(frame(*kept[1:]), stored) == 1.0
    assert count_lost(frame(*kept[:2], ("c", 7, 4.0)), stored) == 4.0
    assert count_lost(frame(*kept, ("d", 10, 8.0)), stored) == 16.0
