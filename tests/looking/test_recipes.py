"""The recipes of docs/reference/datasets.md, run as they are written there, and what they give."""

import json
import math
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest

from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_shards, read, scan
from rollmill.tasks.store.rows import rows_from_table
from rollmill.tasks.store.schemas import dataset_schema
from rollmill.tasks.store.shards.shard import write_shard
from rollmill.tasks.store.shards.shard_names import ShardName

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "datasets.md").read_text()
RECIPES = PAGE.split("\n## Ten recipes\n")[1].split("\n## ")[0]
FIRST, *SECTIONS = re.split(r"\n### ", RECIPES)
Names = dict[str, Any]


def code(section: str) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL))


def run_recipe(section: str, run: RunFolder) -> Names:
    """Return a recipe's variables after it is run on a run."""
    names: Names = {}
    source = f"{code(FIRST)}\n{code(section)}".replace("runs/quickstart", str(run.local))
    exec(compile(source, f"docs/reference/datasets.md, recipe {section.splitlines()[0]}", "exec"), names)
    return names


def best_of_each_problem(names: Names) -> None:
    best = names["best"]
    assert best["group"].to_list() == list(range(12))
    assert best.row(5, named=True)["reward"] == 1.0
    assert best.row(4, named=True)["reward"] == 0.1
    assert json.loads(best.row(10, named=True)["messages"])[-1]["content"] == "[20+30=50]50"


def pass_at_k(names: Names) -> None:
    """Right of four by group: step 0: 0, 1, 1, 4; step 1: 0, 2, 1, 4 (6.1 has no reward); step 2: 0, 2, 3, 4."""
    right = [[0, 1, 1, 4], [0, 2, 1, 4], [0, 2, 3, 4]]
    for row, counts in zip(names["pass_at_k"].to_dicts(), right, strict=True):
        for k in (1, 2, 4):
            expected = [1 - math.comb(4 - c, k) / math.comb(4, k) for c in counts]
            assert row[f"pass@{k}"] == pytest.approx(sum(expected) / 4)


def failures(names: Names) -> None:
    assert names["failures"].select("step", "stage", "error_type", "n").rows() == [
        (1, "rollout", "RequestError", 1),
        (1, "score", "ScoreTimeoutError", 1),
        (2, "rollout", "Deadline", 1),
    ]


def reward_by_length(names: Names) -> None:
    """Wrong answers have 3 tokens, or 11 with a tool; right ones 13, or 21 with a tool."""
    rows = names["by_length"].rows()
    assert [(start, n) for start, n, _ in rows] == [(0, 18), (8, 10), (16, 17)]
    assert [reward for *_, reward in rows] == pytest.approx([0.1, (5 * 1.0 + 5 * 0.1) / 10, 1.0])


def staleness(names: Names) -> None:
    rows = {row["step"]: row for row in names["staleness"].to_dicts()}
    assert {step: row["rows"] for step, row in rows.items()} == {0: 8, 1: 6, 2: 7}
    assert [rows[step]["max_behind"] for step in range(3)] == [0, 1, 1]
    assert [rows[step]["mean_behind"] for step in range(3)] == pytest.approx([0, 2 / 6, 1 / 7])
    assert [rows[step]["share_of_two_versions"] for step in range(3)] == pytest.approx([0, 2 / 6, 1 / 7])


def two_scorers(names: Names) -> None:
    assert names["both"].height == 46
    rows = names["agreement"].to_dicts()
    assert [row["addition@1"] for row in rows] == pytest.approx(
        [(6 + 10 * 0.1) / 16, (7 + 7 * 0.1) / 14, (9 + 6 * 0.1) / 15]
    )
    assert all(-1 <= row["rank_correlation"] < 0 for row in rows), "right answers are the longer ones here"


def worst(names: Names) -> None:
    assert names["conversation"] == ["user: 20+30=", "assistant: 54"]


def speed(names: Names) -> None:
    rows = names["speed"].to_pylist()
    assert [row["server"] for row in rows] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(row["n_completion_tokens_sum"] / row["generate_s_sum"])
    assert sum(row["n_completion_tokens_sum"] for row in rows) == 18 * 3 + 5 * 11 + 6 * 13 + 18 * 21


def effective_batch(names: Names) -> None:
    rows = [tuple(row.values()) for row in names["fates"].to_pylist()]
    assert rows == [
        (0, "", 2, 8),
        (0, "no_reward_spread", 2, 8),
        (1, "", 2, 6),
        (1, "no_reward_spread", 2, 8),
        (2, "", 2, 7),
        (2, "no_reward_spread", 2, 8),
    ]


def fine_tuning_set(names: Names) -> None:
    lines = [json.loads(line) for line in Path("sft.jsonl").read_text().splitlines()]
    assert len(lines) == 9
    assert {line["messages"][0]["content"] for line in lines} == {
        f"{10 + n}+{20 + n}=" for n in range(12) if n % 4
    }
    assert all(line["messages"][-1]["role"] == "assistant" for line in lines)


CHECKS: list[Callable[[Names], None]] = [
    best_of_each_problem,
    pass_at_k,
    failures,
    reward_by_length,
    staleness,
    two_scorers,
    worst,
    speed,
    effective_batch,
    fine_tuning_set,
]


@pytest.mark.parametrize(
    ("section", "check"),
    [pytest.param(*pair, id=pair[1].__name__) for pair in zip(SECTIONS, CHECKS, strict=True)],
)
def test_a_recipe_computes_what_it_describes(
    small_run: RunFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    section: str,
    check: Callable[[Names], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    check(run_recipe(section, small_run))


def test_pass_at_k_and_failures_are_of_the_last_attempts(redone_run: RunFolder) -> None:
    row = run_recipe(SECTIONS[1], redone_run)["pass_at_k"].row(1, named=True)
    assert row["pass@1"] == pytest.approx((0 + 3 + 1 + 4) / 16)
    failed = run_recipe(SECTIONS[2], redone_run)["failures"]
    assert failed.select("step", "stage").rows() == [(1, "score"), (2, "rollout")]


def test_a_group_of_fewer_than_k_attempts_does_not_count_in_pass_at_k(redone_run: RunFolder) -> None:
    shutil.rmtree(redone_run.dataset("rollouts", step=0))
    kept = read(redone_run, "rollouts", step=1).filter(pc.field("sample") < 3)
    shutil.rmtree(redone_run.dataset("rollouts", step=1))
    write = partial(write_shard, name=ShardName(3, 0), dataset="rollouts", appended=[rows_from_table(kept)])
    open_files(redone_run).publish("rollouts/step=000001", write)
    short, whole = run_recipe(SECTIONS[1], redone_run)["pass_at_k"].to_dicts()
    assert short["pass@1"] == pytest.approx((0 + 2 + 1 + 3) / 12)
    assert short["pass@4"] is None
    assert whole["pass@4"] == pytest.approx(3 / 4)


def test_a_plain_scan_before_the_first_shard_fails_and_the_readers_has_zero_rows(tmp_path: Path) -> None:
    with pytest.raises(pl.exceptions.ComputeError, match="expanded paths were empty"):
        pl.scan_ipc(f"{tmp_path}/rollouts/**/*.arrow", hive_partitioning=True).collect()
    assert ds.dataset(list_shards(str(tmp_path), "rollouts"), format="ipc").schema.names == []
    rows = scan(RunFolder(tmp_path), "rollouts").collect()
    assert (rows.columns, rows.height) == (dataset_schema("rollouts").names, 0)


def test_three_libraries_have_three_recipes_at_least() -> None:
    titles = " ".join(section.splitlines()[0] for section in SECTIONS)
    assert all(titles.count(library) >= 3 for library in ("Polars", "DuckDB", "pyarrow"))
