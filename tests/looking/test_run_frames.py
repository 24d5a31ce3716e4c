"""Stored runs as frames and in SQL: rows joined by trajectory, of one run or several, on a disk and on S3."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

import rollmill as api
from rollmill.tasks.errors import ConfigError, SchemaError
from rollmill.tasks.look.tables.run_frames import VIEWS, RunFrames
from rollmill.tasks.look.tables.scores import resolve_scorer
from rollmill.tasks.look.tables.trajectory_record import find_trajectory
from rollmill.tasks.store.attempts import last_attempts
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder, partition_folder
from rollmill.tasks.store.logprob_rows import make_logprob_rows
from rollmill.tasks.store.reader import read, scan
from rollmill.tasks.store.rows import rows_from_table
from rollmill.tasks.store.run.manifest import ForkOrigin, read_manifest, write_manifest
from rollmill.tasks.store.run.run_search import distinct_runs
from rollmill.tasks.store.shards.shard import write_shard
from rollmill.tasks.store.shards.shard_names import ShardName
from rollmill.tasks.store.shards.writer import RunWriter

Command = Callable[..., str]
PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "queries.md").read_text()
QUESTIONS = re.findall(r"^```sql\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def join_by_hand(folder: RunFolder, scorer: str) -> dict[str, dict[str, Any]]:
    """What scoring and the batch made of each trajectory, found one row at a time."""

    def by_id(dataset: str, **partition: str) -> dict[str, dict[str, Any]]:
        return {row["trajectory_id"]: row for row in read(folder, dataset, **partition).to_pylist()}

    scores, batch = by_id("scores", scorer=scorer), by_id("batches")
    reasons = {(row["group"], row["subgroup"]): row["reason"] for row in read(folder, "groups").to_pylist()}
    found = {}
    for row in last_attempts(scan(folder, "rollouts")).collect().to_dicts():
        score: Mapping[str, Any] = scores.get(row["trajectory_id"], {})
        reward = score.get("reward", math.nan)
        found[row["trajectory_id"]] = {
            "reward": None if math.isnan(reward) else reward,
            "score_status": score.get("status"),
            "subgroup": score.get("subgroup"),
            "advantage": batch.get(row["trajectory_id"], {}).get("advantage"),
            "group_reason": reasons.get((row["group"], score.get("subgroup", 0))),
        }
    return found


def read_joined(frames: RunFrames) -> dict[str, dict[str, Any]]:
    columns = ("reward", "score_status", "subgroup", "advantage", "group_reason")
    rows = frames.trajectories.select("trajectory_id", *columns).collect().to_dicts()
    assert len({row["trajectory_id"] for row in rows}) == len(rows)
    return {row.pop("trajectory_id"): row for row in rows}


@pytest.mark.parametrize("scorer", ["addition@1", "brevity@1"])
def test_each_trajectory_has_its_reward_advantage_and_the_reason_of_its_group(
    small_run: RunFolder, scorer: str
) -> None:
    joined = read_joined(api.open_run(small_run.location, scorer=scorer))
    assert joined == join_by_hand(small_run, scorer)
    assert len(joined) == 48


def test_of_a_trajectory_that_was_sampled_again_the_last_attempt_is_there(redone_run: RunFolder) -> None:
    joined = read_joined(api.open_run(redone_run.location))
    assert joined == join_by_hand(redone_run, "addition@1")
    assert any(name.endswith(".5.3.1") for name in joined)
    assert not any(name.endswith(".5.3.0") for name in joined)


def test_the_reason_of_a_group_is_that_of_the_scorer_which_trains(
    small_run: RunFolder, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(small_run.local, folder.local)
    for step in range(3):
        rows = read(small_run, "scores", scorer="addition@1", step=step)
        own = rows.to_batches()[0].to_pylist()
        made = pa.RecordBatch.from_pylist([row | {"subgroup": 1} for row in own], schema=rows.schema)
        write = partial(write_shard, name=ShardName(2, 0), dataset="scores", appended=[made])
        open_files(folder).publish(partition_folder("scores", {"scorer": "halves@1", "step": step}), write)
    trained, other = (read_joined(api.open_run(folder.location, scorer=each)) for each in ("", "halves@1"))
    assert {row["subgroup"] for row in other.values()} == {1, None}
    assert {name: row["group_reason"] for name, row in other.items()} == {
        name: row["group_reason"] for name, row in trained.items()
    }


def test_a_trajectory_without_a_score_has_a_reason_though_its_group_is_split_from_1_on(
    small_run: RunFolder, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "split")
    shutil.copytree(small_run.local, folder.local)
    for dataset, outer in {"groups": {}, "scores": {"scorer": "addition@1"}}.items():
        rows = read(folder, dataset, step=1, **outer)
        own = [
            row | {"subgroup": 1 if row.get("status", "scored") == "scored" else 0}
            for row in rows.to_pylist()
        ]
        made = pa.RecordBatch.from_pylist(own, schema=rows.schema)
        place = partition_folder(dataset, {**outer, "step": 1})
        shutil.rmtree(folder.local / place)
        write = partial(write_shard, name=ShardName(2, 0), dataset=dataset, appended=[made])
        open_files(folder).publish(place, write)
    of_step = RunFrames([folder]).trajectories.filter(pl.col("step") == 1).collect()
    lost = of_step.filter(pl.col("reward").is_null())
    assert len(lost)
    assert of_step["group_reason"].null_count() == 0
    for name in lost["trajectory_id"]:
        assert find_trajectory(folder, name).group["subgroup"] == 1


def test_without_a_scorer_the_rewards_are_those_that_the_run_trains_on(small_run: RunFolder) -> None:
    named = api.open_run(small_run.location, scorer="addition@1")
    assert read_joined(api.open_run(small_run.location)) == read_joined(named)


@pytest.mark.parametrize(
    ("columns", "predicate"),
    [
        (["reward"], pl.col("advantage") > 0),
        (["group_reason", "step"], pl.col("status") == "complete"),
        (["token_ids", "location"], pl.col("reward").is_null()),
    ],
)
def test_a_query_for_some_columns_and_rows_gives_those_of_the_whole(
    small_run: RunFolder, columns: list[str], predicate: pl.Expr
) -> None:
    frame = api.open_run(small_run.location).trajectories
    some = frame.filter(predicate).select("trajectory_id", *columns).sort("trajectory_id").collect()
    whole = frame.collect().filter(predicate).select("trajectory_id", *columns).sort("trajectory_id")
    assert len(some)
    assert some.equals(whole)
    assert len(frame.filter(predicate).head(1).collect()) == 1


def test_a_condition_after_a_limit_is_one_on_the_first_rows(
    small_run: RunFolder, small_run_on_s3: RunFolder
) -> None:
    is_right = pl.col("reward") > 0.5
    for folder in (small_run, small_run_on_s3):
        for frame in (
            api.open_run(folder.location).trajectories,
            api.open_run(folder.location).dataset("scores"),
        ):
            first = frame.head(20).filter(is_right).select("trajectory_id").collect()
            assert first.equals(frame.collect().head(20).filter(is_right).select("trajectory_id"))
            assert 0 < len(first) < 20


def test_a_name_with_the_signs_of_a_pattern_reads_no_other_run(small_run: RunFolder, tmp_path: Path) -> None:
    odd = shutil.copytree(small_run.local, tmp_path / "run[12]")
    other = shutil.copytree(small_run.local, tmp_path / "run1")
    for shard in other.glob("rollouts/step=000000/*.arrow"):
        shutil.copy(next(other.glob("rollouts/step=000001/*.arrow")), shard)
    steps = api.open_run(str(odd)).sql("select distinct step from trajectories order by step")
    assert steps["step"].to_list() == [0, 1, 2]


def test_a_question_imports_neither_the_flows_nor_pandas(small_run: RunFolder) -> None:
    code = (
        "import sys, rollmill\n"
        "rollmill.open_run(sys.argv[1]).sql('select reward, advantage, group_reason from trajectories')\n"
        "print(*(name for name in sys.modules if name.startswith('rollmill.flows.') or name == 'pandas'))"
    )
    command = [sys.executable, "-c", code, small_run.location]
    assert subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip() == ""


def test_runs_on_a_disk_and_on_s3_are_read_together(small_run: RunFolder, small_run_on_s3: RunFolder) -> None:
    both = api.open_run(small_run.location, small_run_on_s3.location)
    rows = both.trajectories.sort("location", "trajectory_id").collect()
    here, there = (
        rows.filter(pl.col("location") == each.location).drop("location")
        for each in (small_run, small_run_on_s3)
    )
    assert here.equals(there)
    assert len(here) == 48
    counted = both.sql("select location, count(*) as n from evaluations group by all order by all")
    assert dict(counted.iter_rows()) == {small_run.location: 8, small_run_on_s3.location: 8}


def test_every_view_can_be_queried_also_of_a_run_with_no_rows(small_run: RunFolder, tmp_path: Path) -> None:
    empty = RunFolder(tmp_path / "empty")
    empty.local.mkdir()
    shutil.copy(small_run.local / "run.json", empty.local)
    for view in VIEWS:
        (stored,) = api.open_run(small_run.location).sql(f"select count(*) from {view}").row(0)
        joined = {"trajectories": 48, "costs": 0}
        assert stored == (joined[view] if view in joined else read(small_run, view).num_rows)
        assert api.open_run(empty.location).sql(f"select * from {view}").is_empty()


def test_a_data_set_or_some_of_its_partitions_is_read_as_it_is_stored(small_run: RunFolder) -> None:
    frames = api.open_run(small_run.location)
    stored = frames.dataset("scores", scorer="brevity@1", step=1).drop("location").collect()
    assert stored.equals(scan(small_run, "scores", scorer="brevity@1", step=1).collect())
    with pytest.raises(SchemaError, match="no data set is called 'score'"):
        frames.dataset("score")
    with pytest.raises(SchemaError, match=r"states: give env=NAME, .*; there are none"):
        frames.dataset("states", env="calculator")
    with pytest.raises(ConfigError, match="QUERY = '': it is empty: give a query"):
        frames.sql("")


async def test_log_probabilities_of_several_policies_are_rows_of_one_view_with_their_policy(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.tmp.mkdir(parents=True)
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        for policy, value in (("reference", -1.0), ("trainer", -2.0)):
            rows = make_logprob_rows("run", 0, ["m"], ["run.1.0.0"], [np.array([np.nan, value])])
            await writer.append("logprobs", rows, policy=policy, step=0)
    found = RunFrames([folder]).sql("select policy, logprobs[2] from logprobs order by policy")
    assert found.rows() == [("reference", -1.0), ("trainer", -2.0)]
    one = RunFrames([folder]).dataset("logprobs", policy="trainer").collect()
    assert one["policy"].to_list() == ["trainer"]


def test_a_run_or_a_scorer_that_is_not_there_is_refused(small_run: RunFolder) -> None:
    with pytest.raises(ConfigError, match="name at least one run"):
        api.open_run()
    with pytest.raises(ConfigError, match="there is no run in this folder"):
        api.open_run(small_run.location, "nowhere/at/all")
    with pytest.raises(ConfigError, match="the runs have scores of addition@1, brevity@1"):
        api.open_run(small_run.location, scorer="addition@2")


QUERY = "select env, count(*) as n, avg(reward) as mean from trajectories group by env order by env"


def test_a_run_that_is_named_twice_counts_once(small_run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(small_run.local.absolute())
    names = (small_run.location, f"{small_run.location}/", small_run.absolute, str(tmp_path / "link"))
    assert len(api.open_run(*names).trajectories.collect()) == len(
        api.open_run(small_run.location).trajectories.collect()
    )
    assert distinct_runs(map(RunFolder, ("s3://b/a", "s3://b/a/", "s3://b/c"))) == [
        RunFolder("s3://b/a"),
        RunFolder("s3://b/c"),
    ]


def test_a_wrong_query_whose_error_is_kept_leaves_nothing_of_duckdb() -> None:
    kept = """
import ctypes
import polars as pl
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.sql_query import run_query
try:
    run_query("QUERY", "q", "select nope from t", {"t": lambda: pl.LazyFrame({"a": [1]})})
except ConfigError as error:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(error))
"""
    ended = subprocess.run([sys.executable, "-c", kept], capture_output=True, text=True, check=True)
    assert ended.stderr == ""


def test_the_command_prints_a_table_or_json_of_one_run_or_several(
    rollmill: Command, small_run: RunFolder, tmp_path: Path
) -> None:
    shutil.copytree(small_run.local, tmp_path / "copy")
    rows = json.loads(rollmill("sql", "small", QUERY, "--json"))["rows"]
    assert [(row["env"], row["n"]) for row in rows] == [("addition", 24), ("calculator", 24)]
    shown = rollmill("sql", "small", str(tmp_path / "copy"), QUERY)
    assert "2 rows" in shown
    assert [line.split()[:2] for line in shown.splitlines()[-2:]] == [
        ["addition", "48"],
        ["calculator", "48"],
    ]
    assert "2 of 48; --limit 0 shows all" in rollmill("sql", "small", "from trajectories", "--limit", "2")


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("select nothing from trajectories", 'Referenced column "nothing" not found'),
        ("select 1 from trajectory", "there are the views trajectories, costs, annotations"),
        ("selec", "syntax error"),
    ],
)
def test_a_wrong_query_is_refused_with_the_reason(rollmill: Command, query: str, message: str) -> None:
    assert message in rollmill("sql", "small", query)


def test_a_result_that_is_no_table_and_a_cut_shard_are_refused(small_run: RunFolder, tmp_path: Path) -> None:
    cut = shutil.copytree(small_run.local, tmp_path / "cut")
    for shard in cut.glob("rollouts/*/*.arrow"):
        os.truncate(shard, 1000)
    with pytest.raises(ConfigError, match=r"give it as seconds, such as epoch\(a - b\)$"):
        api.open_run(small_run.location).sql("select interval 1 day")
    with pytest.raises(ConfigError, match="`rollmill verify` names it"):
        api.open_run(str(cut)).sql("select step from trajectories")


def test_a_query_alone_is_refused(rollmill: Command) -> None:
    assert "name at least one run" in rollmill("sql", QUERY)


def test_text_of_a_model_cannot_control_the_terminal(rollmill: Command) -> None:
    assert "␛[31m" in rollmill("sql", "small", "select chr(27) || '[31mred' as said")


def list_trajectories(folder: RunFolder) -> list[dict[str, Any]]:
    """Rollouts with what `join_by_hand` found of them."""
    joined = join_by_hand(folder, "addition@1")
    rows = last_attempts(scan(folder, "rollouts")).collect().to_dicts()
    return [row | joined[row["trajectory_id"]] for row in rows]


def rewards_by_prompt(folder: RunFolder) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in list_trajectories(folder):
        if row["reward"] is not None:
            found.setdefault(row["example_id"], []).append(row["reward"])
    return found


def test_the_prompts_that_are_solved_half_of_the_time_are_found(small_run: RunFolder) -> None:
    found = api.open_run(small_run.location).sql(QUESTIONS[0])
    means = {prompt: fmean(rewards) for prompt, rewards in rewards_by_prompt(small_run).items()}
    expected = {prompt: pytest.approx(mean) for prompt, mean in means.items() if 0.35 <= mean <= 0.65}
    assert dict(found.select("example_id", "solved").iter_rows()) == expected
    assert expected


def test_the_seconds_of_trajectories_are_divided_by_what_became_of_them(small_run: RunFolder) -> None:
    found = api.open_run(small_run.location).sql(QUESTIONS[1])
    seconds: Counter[str] = Counter()
    for row in list_trajectories(small_run):
        is_trained = row["advantage"] is not None
        scored = row["score_status"] if row["score_status"] != "scored" else ""
        fate = "trained" if is_trained else row["group_reason"] or scored or row["status"]
        seconds[fate] += row["generate_s"]
    assert dict(found.select("fate", "seconds").iter_rows()) == pytest.approx(dict(seconds))
    assert found["share"].sum() == pytest.approx(1)
    assert set(seconds) == {"trained", "no_reward_spread", "failed", "cancelled"}


def test_the_prompts_whose_attempts_all_get_the_same_reward_are_found(small_run: RunFolder) -> None:
    found = api.open_run(small_run.location).sql(QUESTIONS[2])
    same = {
        prompt: rewards[0]
        for prompt, rewards in rewards_by_prompt(small_run).items()
        if len(set(rewards)) == 1
    }
    assert dict(found.select("example_id", "reward").iter_rows()) == same
    assert same


def test_rewards_are_compared_by_the_age_of_the_policy(small_run: RunFolder) -> None:
    found = api.open_run(small_run.location).sql(QUESTIONS[3])
    rewards: dict[int, list[float | None]] = {}
    for row in list_trajectories(small_run):
        if row["policy_version_first"] >= 0:
            rewards.setdefault(row["step"] - row["policy_version_first"], []).append(row["reward"])
    for behind, n, mean, _ in found.iter_rows():
        assert n == len(rewards[behind])
        assert mean == pytest.approx(fmean(each for each in rewards[behind] if each is not None))
    assert found["versions_behind"].to_list() == sorted(rewards) == [0, 1]


def test_held_out_problems_that_got_worse_are_found(small_run: RunFolder) -> None:
    frames = api.open_run(small_run.location)
    assert frames.sql(QUESTIONS[4]).is_empty()
    # Of the sampled answers one got better: by that the same query, turned round, is known to find anything.
    better = QUESTIONS[4].replace("where greedy", "where not greedy").replace("reward < ", "reward > ")
    assert [row[2:] for row in frames.sql(better).iter_rows()] == [(0.1, 1.0)]


def test_the_python_of_the_page_runs(small_run: RunFolder) -> None:
    (source,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(source.replace("runs/quickstart", small_run.location), names)
    assert len(names["entropy"]) == 6
    assert names["table"]["step"].to_list() == [0, 1, 2]


def test_a_run_without_batches_has_the_rewards_of_the_recorded_scorer(
    small_run: RunFolder, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "collected")
    shutil.copytree(small_run.local, folder.local)
    shutil.rmtree(folder.local / "batches")
    scores = folder.local / "scores"
    shutil.copytree(scores / "scorer=addition@1", scores / "scorer=addition@2")
    assert resolve_scorer(folder) == "addition@2"
    whole = read_manifest(folder)
    recorded = replace(whole, scorer="addition@1")
    write_manifest(open_files(folder), recorded, whole)
    assert resolve_scorer(folder) == "addition@1"
    # A version without scores yet leaves those of the earlier ones.
    write_manifest(open_files(folder), replace(whole, scorer="addition@3"), recorded)
    assert resolve_scorer(folder) == "addition@2"


def test_groups_of_a_collected_run_are_no_version_behind(small_run: RunFolder, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs' copy")
    shutil.copytree(small_run.local, folder.local)
    whole = read_manifest(folder)
    write_manifest(open_files(folder), replace(whole, trains=False), whole)
    frames = RunFrames([small_run, folder])
    behind = frames.list_groups().group_by("location").agg(pl.col("versions_behind").max())
    assert dict(behind.iter_rows()) == {small_run.location: 1, folder.location: 0}
    assert frames.find_groups("where", "versions_behind = 1")
    assert not RunFrames([folder]).find_groups("where", "versions_behind = 1")


def test_sums_are_numbers(small_run: RunFolder) -> None:
    run = api.open_run(small_run.location)
    found = run.sql(
        "select sum(n_completion_tokens) as tokens, 1.5 as half, sum(10::hugeint ** 30) as large from rollouts"
    )
    assert found.dtypes == [pl.Int64, pl.Float64, pl.Float64]
    assert found["tokens"][0] == sum(read(small_run, "rollouts")["n_completion_tokens"].to_pylist())


async def test_copied_steps_of_a_fork_have_the_rewards_that_they_were_trained_on(
    rollmill: Command, small_run: RunFolder, tmp_path: Path
) -> None:
    """As one that was forked at step 1 with another scorer: the rewards of step 0 are those of the source's."""
    folder = RunFolder(shutil.copytree(small_run.local, tmp_path / "fork"))
    files, manifest = open_files(folder), read_manifest(folder)
    origin = ForkOrigin(manifest.run, small_run.location, 1)
    write_manifest(files, replace(manifest, run="f" * 16, origins=(origin,)), manifest)
    (folder.local / "scores/scorer=earlier@1").mkdir()
    scores = folder.local / "scores/scorer=addition@1/step=000000"
    scores.rename(folder.local / "scores/scorer=earlier@1/step=000000")
    batch = read(folder, "batches", step=0)
    place = batch.schema.get_field_index("scorer")
    renamed = pa.array(["earlier@1"] * batch.num_rows, batch.schema.field(place).type)
    changed = batch.set_column(place, batch.schema.field(place), renamed)
    async with RunWriter(files, 9, 0.0) as writer:
        await writer.replace("batches", rows_from_table(changed), step=0)

    query = (
        "select step, avg(reward) as reward, count(reward) as n from trajectories group by step order by step"
    )
    found, expected = (api.open_run(each.location).sql(query) for each in (folder, small_run))
    assert found.equals(expected)
    assert found["n"].min() > 0
    words = ("--status", "unscored", "--json")
    unscored = [
        json.loads(rollmill("inspect", str(each), *words)) for each in (folder.local, small_run.local)
    ]
    assert unscored[0]["trajectories"] == unscored[1]["trajectories"]
    shown = " ".join(rollmill("inspect", str(folder.local), "--trajectories").split())
    assert "rewards of steps 0 to 0 are by earlier@1, which they were trained on" in shown
