"""The summary that a finished run prints: what its held-out answers were before and after."""

import math
import shutil
from pathlib import Path

import polars as pl
import pytest

from rollmill.tasks.look.comparisons.changed_answers import compare_answers, count_unscored
from rollmill.tasks.look.terminal.run_summary import print_summary
from rollmill.tasks.observe.metrics import ALL
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.rows import Rows, rows_from_table
from rollmill.tasks.store.shards.writer import RunWriter

BAD, GOOD = 1, 3
"""Policy versions: in the first, the greedy answer to the second problem is wrong."""


def edit_version_0(folder: RunFolder, *changes: pl.Expr) -> Rows:
    """Return an evaluation of version `BAD`: that of version 0 with changed columns."""
    table = read(folder, "evaluations", version=0)
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    edited = frame.with_columns(
        *changes,
        pl.lit(BAD, pl.Int32).alias("policy_version"),
        pl.lit(BAD, pl.Int32).alias("step"),
        ("x" + pl.col("trajectory_id")).alias("trajectory_id"),
    )
    return rows_from_table(edited.to_arrow().select(table.column_names).cast(table.schema))


@pytest.fixture
async def changed_run(small_run: RunFolder, tmp_path: Path) -> RunFolder:
    """The run with an evaluation of version `BAD`, of which a row is stored twice."""
    folder = RunFolder(tmp_path / "runs" / "changed")
    shutil.copytree(small_run.local, folder.local)
    is_changed = pl.col("greedy") & (pl.col("group") == pl.col("group").max())
    rows = edit_version_0(
        folder,
        pl.when(is_changed).then(0.1).otherwise("reward").alias("reward"),
        pl.when(is_changed)
        .then(
            pl.lit(
                '[{"role": "user", "content": "47+38="}, {"role": "assistant", "content": "\\u001b[1m84"}]'
            )
        )
        .otherwise("messages")
        .alias("messages"),
    )
    async with RunWriter(open_files(folder), epoch=2, flush_s=0.0) as writer:
        await writer.append("evaluations", rows, version=BAD)
        await writer.append("evaluations", rows.slice(0, 1), version=BAD)
    return folder


async def test_answers_that_turned_right_or_wrong_are_counted_with_examples(changed_run: RunFolder) -> None:
    changed = compare_answers(changed_run, ALL, BAD, GOOD)
    assert (changed.gained, changed.lost) == (1, 0)
    ((problem, before, after),) = changed.examples
    assert (problem, before) == ("47+38=", "\x1b[1m84")
    assert after
    back = compare_answers(changed_run, "addition", GOOD, BAD)
    assert (back.gained, back.lost, back.examples) == (0, 1, ())
    assert compare_answers(changed_run, "another", BAD, GOOD).gained == 0


def test_the_summary_shows_no_change_where_there_is_none(
    small_run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    print_summary(small_run, "http://127.0.0.1:4200/runs")
    said = capsys.readouterr().out
    assert "accuracy, greedy" in said
    assert "turned right" not in said


async def test_answers_without_a_score_are_no_gain_and_are_counted(
    small_run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "runs" / "unscored")
    shutil.copytree(small_run.local, folder.local)
    shutil.rmtree(folder.local / "evaluations" / "version=000000")
    unscored = pl.lit(math.nan).alias("reward"), pl.lit("KeyError").alias("error_type")
    async with RunWriter(open_files(folder), epoch=2, flush_s=0.0) as writer:
        await writer.append("evaluations", edit_version_0(small_run, *unscored), version=BAD)
    assert (compare_answers(folder, ALL, BAD, GOOD).gained, count_unscored(folder, ALL, BAD)) == (0, 4)
    assert count_unscored(folder, "another", BAD) == count_unscored(folder, ALL, GOOD) == 0
    print_summary(folder, "http://127.0.0.1:4200/runs")
    said = capsys.readouterr().out
    assert "no score, counts as 0" in said
    assert "turned right" not in said
