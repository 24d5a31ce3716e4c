"""What trajectories cost: shares of servers against a naive sum, sums against processes and seconds, fates, and where it is shown."""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import plotly.io
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from span_rows import Row, spans_of
from stored_spans import store_spans

import rollmill as api
from rollmill.flows.configuration.recipe import run_tokenizer
from rollmill.tasks.look.ledger.run_ledger import read_ledger
from rollmill.tasks.look.ledger.step_attribution import Ledger, build_ledger
from rollmill.tasks.look.tables.costs import OPEN, TRAINED, find_fate, measure_costs
from rollmill.tasks.look.tables.run_frames import RunFrames
from rollmill.tasks.look.tables.selection import Interval
from rollmill.tasks.look.web.app import render_page
from rollmill.tasks.look.web.run_data import RunData
from rollmill.tasks.store.folders import RunFolder

SERVERS = ("http://10.0.0.1:8000", "http://10.0.0.2:8000")
RUN = "5eed5eed5eed5eed"
Command = Callable[..., str]


def naive_shares(requests: list[tuple[int, int, int]], windows: list[tuple[int, int]]) -> dict[str, float]:
    """Walk over every second: of each server that generates, a second is shared by its open requests."""
    found: dict[str, float] = defaultdict(float)
    for second in range(30):
        if not any(start <= second < end for start, end in windows):
            continue
        for server in range(len(SERVERS)):
            is_open = [
                n for n, (at, start, end) in enumerate(requests) if at == server and start <= second < end
            ]
            for number in is_open:
                found[f"0.{number}"] += 1 / len(is_open)
    return found


def ledger_of(requests: list[tuple[int, int, int]], windows: list[tuple[int, int]]) -> Ledger:
    rows: list[Row] = [(n, "flow", "step", "step", *window) for n, window in enumerate(windows)]
    for n, (server, start, end) in enumerate(requests):
        rows.append((0, "flow", f"0.{n}", "generating", start, end, SERVERS[server]))
    for server, address in enumerate(SERVERS):
        busy = [
            any(at == server and start <= second < end for at, start, end in requests) for second in range(30)
        ]
        rows += [
            (0, address, "main", "generating" if is_busy else "idle", second, second + 1)
            for second, is_busy in enumerate(busy)
        ]
    return build_ledger(spans_of(*rows))


requests = st.tuples(st.integers(0, 1), st.integers(0, 20), st.integers(1, 9)).map(
    lambda each: (each[0], each[1], each[1] + each[2])
)


@settings(max_examples=50, deadline=None)
@given(st.lists(requests, min_size=1, max_size=8), st.integers(1, 15), st.integers(0, 5), st.integers(1, 9))
def test_a_server_is_shared_by_the_requests_that_are_open(
    given_requests: list[tuple[int, int, int]], first_s: int, gap_s: int, second_s: int
) -> None:
    windows = [(0, first_s), (first_s + gap_s, first_s + gap_s + second_s)]
    ledger = ledger_of(given_requests, windows)
    shares = dict(ledger.server_shares.select("lane", pl.col("us") / 1e6).iter_rows())
    expected = naive_shares(given_requests, windows)
    assert {lane: value for lane, value in shares.items() if value} == pytest.approx(expected)
    busy = ledger.owners.filter(pl.col("name") == "generating", pl.col("process") != "flow")
    assert sum(shares.values()) == pytest.approx(busy["us"].sum() / 1e6)


def test_costs_add_up_to_the_seconds_of_all_servers_and_ranks(timed_run: RunFolder) -> None:
    costs = api.open_run(timed_run.location).costs.collect()
    ledger = read_ledger(timed_run)
    sizes = ledger.steps.join(ledger.there, on="step")
    for column, count in (("server_s", "n_servers"), ("trainer_s", "n_ranks")):
        assert costs[column].sum() == pytest.approx((sizes["us"] * sizes[count]).sum() / 1e6)
    assert costs.select(pl.col("server_s", "trainer_s").min() >= 0).row(0) == (True, True)


def test_of_other_steps_only_what_servers_answered_meanwhile_is_there(timed_run: RunFolder) -> None:
    costs = api.open_run(timed_run.location).measure_costs(timed_run, read_ledger(timed_run, Interval(1, 1)))
    each = costs.filter(pl.col("trajectory").is_not_null())
    assert len(each.filter(step=1)) == 16
    # The spans made for step 1 have lanes of group 1, which is stored in step 0.
    assert dict(each.filter(pl.col("step") != 1).select("trajectory", "server_s").iter_rows()) == {
        "1.0": 2.5,
        "1.1": 2.5,
    }


def test_the_seconds_that_ranks_train_are_shared_by_tokens_of_the_batch(timed_run: RunFolder) -> None:
    frames = api.open_run(timed_run.location)
    costs = frames.costs.collect()
    trained_s = costs.filter(pl.col("fate") == TRAINED).group_by("step").agg(pl.col("trainer_s").sum())
    # Rank 0 works and waits for 2.7 s of a step, rank 1 works for 2.6 s.
    assert dict(trained_s.iter_rows()) == pytest.approx({0: 5.3, 1: 5.3, 2: 5.3})
    assert costs.filter(pl.col("fate") != TRAINED, pl.col("trajectory").is_not_null())["trainer_s"].sum() == 0
    tokens = pl.col("n_prompt_tokens") + pl.col("n_completion_tokens")
    place = pl.format("{}.{}", "group", "sample").alias("trajectory")
    both = costs.join(frames.trajectories.select(place, tokens=tokens).collect(), on="trajectory")
    rates = (
        both.filter(pl.col("fate") == TRAINED)
        .group_by("step")
        .agg((pl.col("trainer_s") / pl.col("tokens")).std().alias("spread"))
    )
    assert rates["spread"].max() == pytest.approx(0.0, abs=1e-12)


def test_every_trajectory_has_the_fate_that_is_stored(redone_run: RunFolder) -> None:
    store_spans(redone_run, RUN, *((n, "flow", "step", "step", 10 * n, 10 * n + 10) for n in range(3)))
    costs = api.open_run(redone_run.location).costs.collect()
    fates = dict(costs.filter(pl.col("trajectory").is_not_null()).select("trajectory", "fate").iter_rows())
    assert len(fates) == 49
    assert fates["5.3"] == "sampled again"
    trained = {
        row["trajectory_id"]
        for row in api.open_run(redone_run.location).dataset("batches").collect().to_dicts()
    }
    assert {f"{RUN}.{name}.0" for name, fate in fates.items() if fate == TRAINED} == trained
    assert fates["0.0"] == "no_reward_spread"
    assert fates["6.1"] == "failed"


@pytest.mark.parametrize(
    ("advantage", "group_reason", "score_status", "status", "fate"),
    [
        (0.0, "", "scored", "truncated", TRAINED),
        (None, "", "scored", "truncated", "truncated"),
        (None, "", "failed", "complete", "failed"),
        (None, "", None, "cancelled", "cancelled"),
        (None, "no_reward_spread", "scored", "complete", "no_reward_spread"),
        (None, None, None, "complete", OPEN),
    ],
)
def test_a_trajectory_that_is_not_trained_on_has_the_reason_as_its_fate(
    advantage: float | None, group_reason: str | None, score_status: str | None, status: str, fate: str
) -> None:
    row = {
        "advantage": advantage,
        "group_reason": group_reason,
        "score_status": score_status,
        "status": status,
    }
    types = {"advantage": pl.Float64} | dict.fromkeys(("group_reason", "score_status", "status"), pl.String)
    assert pl.DataFrame([row], types).select(find_fate()).item() == fate


def test_a_score_of_a_group_is_shared_by_its_trajectories(timed_run: RunFolder) -> None:
    store_spans(
        timed_run,
        RUN,
        (1, "flow", "4", "scoring", 13.0, 15.0),
        # Scored one by one, in 0.5 s, within the span of the group.
        (1, "flow", "6", "scoring", 12.0, 15.0),
        (1, "flow", "6.0/brevity", "scoring", 12.0, 12.5),
    )
    costs = api.open_run(timed_run.location).costs.collect()
    seconds = dict(
        costs.filter(pl.col("trajectory").str.contains(r"^[46]\."))
        .select("trajectory", "scorer_s")
        .iter_rows()
    )
    assert seconds == pytest.approx(
        dict.fromkeys(("4.0", "4.1", "4.2", "4.3"), 0.5) | {"6.0": 0.5, "6.1": 0.0, "6.2": 0.0, "6.3": 0.0}
    )


def test_rows_of_other_runs_share_the_training_evenly(timed_run: RunFolder) -> None:
    frames = api.open_run(timed_run.location)
    batches = frames.dataset("batches").with_columns(
        pl.col("trajectory_id").str.replace(RUN, "beef"), source=pl.lit("runs/other")
    )
    rollouts, evaluations = (frames.dataset(name) for name in ("rollouts", "evaluations"))
    costs = measure_costs(read_ledger(timed_run), rollouts, frames.trajectories, batches, evaluations)
    rows = costs.filter(pl.col("trajectory").str.starts_with("beef"), pl.col("step") == 1)
    assert rows["trainer_s"].n_unique() == 1
    assert rows["trainer_s"].sum() == pytest.approx(5.3)


def test_inspect_shows_them_with_their_price(rollmill: Command, timed_run: RunFolder) -> None:
    manifest = timed_run.local / "run.json"
    stored = json.loads(manifest.read_text())
    stored["config"]["observe"]["price_per_hour"] = 36.0
    manifest.write_text(json.dumps(stored))
    values = json.loads(rollmill("inspect", timed_run.location, "--costs", "--json"))
    # Three steps of ten seconds, with one server and two ranks.
    assert (values["seconds"], values["process_seconds"]) == (30.0, 90.0)
    assert sum(row["percent"] for row in values["costs"]) == pytest.approx(100.0)
    assert sum(row["price"] for row in values["costs"]) == pytest.approx(0.9)
    rows = RunFrames([timed_run]).dataset("evaluations").collect()
    n_inside = sum(row["trajectories"] for row in values["costs"] if row["fate"] == "evaluation")
    assert f"{len(rows) - n_inside} of {len(rows)} held-out answers are of other times" in rollmill(
        "inspect", timed_run.location, "--costs"
    )
    text = rollmill("inspect", timed_run.location, "--costs", "--step", "1")
    assert "of the servers' seconds that made trajectories, 0.0% went to ones not trained on" in text
    assert "1 step took 10.0 s; servers and ranks together had 30.0 s" in text


def test_options_that_costs_do_not_have_are_refused(rollmill: Command, timed_run: RunFolder) -> None:
    run = timed_run.location
    assert "is of trajectories and groups; leave --costs out" in rollmill(
        "inspect", run, "--costs", "--status", "trained"
    )
    assert "evaluations are among the costs" in rollmill("inspect", run, "--costs", "--evaluations")
    assert "give one of them" in rollmill("inspect", run, "--costs", "--groups")
    assert "the run has addition, calculator" in rollmill("inspect", run, "--costs", "--env", "guess")
    assert "it has no stored spans" in rollmill("inspect", "small", "--costs")


def test_sql_has_them_by_prompt(timed_run: RunFolder) -> None:
    query = "select example_id, sum(server_s) as s from costs where trajectory is not null group by all order by s desc"
    found = api.open_run(timed_run.location).sql(query)
    assert found["s"].sum() == pytest.approx(3 * 5.0)
    assert len(found) == 12


def test_the_query_of_the_page_names_the_costliest_prompts(timed_run: RunFolder) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "queries.md").read_text()
    (query,) = (each for each in re.findall(r"```sql\n(.*?)```", page, re.DOTALL) if "from costs" in each)
    found = api.open_run(timed_run.location).sql(query)
    assert found["server_s"].to_list()[:2] == pytest.approx([5.0, 5.0])
    assert set(found["n"]) == {4}


def test_the_viewer_has_the_table(timed_run: RunFolder) -> None:
    page = render_page(RunData(timed_run, 0.0, run_tokenizer), "/time", "")
    assert "what it cost" in plotly.io.json.to_json_plotly(page)
