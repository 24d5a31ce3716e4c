"""`rollmill spans`: where the time went, of a run whose every second is known."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from span_rows import spans_of, whole_step

from tasks.store.filesystem import files_of
from tasks.store.layout import RunFolder
from tasks.store.names import ShardName
from tasks.store.schemas import schema_of
from tasks.store.shard import write_shard

Command = Callable[..., str]
RUN = "5eed5eed5eed5eed"


@pytest.fixture
def timed_run(small_run: RunFolder, tmp_path: Path) -> RunFolder:
    """Three steps of ten seconds each, in a copy of the small run."""
    folder = RunFolder(tmp_path / "runs" / "timed")
    shutil.copytree(small_run.local, folder.local)
    for step in range(3):
        rows = spans_of(*whole_step(step, began=10.0 * step)).to_dicts()
        table = [{"run": RUN} | row for row in rows]
        made = pa.RecordBatch.from_pylist(table, schema=schema_of("spans"))
        write = partial(write_shard, name=ShardName(1, step), dataset="spans", appended=[made])
        files_of(folder).publish(f"spans/step={step:06d}", write)
    return folder


def test_the_table_has_every_owner_and_says_what_would_shorten_a_step(
    rollmill: Command, timed_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = rollmill("spans", timed_run.location)
    assert max(map(len, said.splitlines())) <= 80
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert "timed, median of 3 steps: 10.00 s, by what decided it" in lines
    assert "collect generating 3.500 35.0" in lines
    assert "train forward 2.300 23.0" in lines
    assert "2 ranks waiting_for_rank trainer/1 0.750 7.5 1.500 1.500" in lines
    assert "busiest rank: trainer/1, 2.60 s of a step, 1.40 s more than the least busy" in lines
    assert "another server 2.500" in lines
    assert "generation takes 1.9 times as long as training" in said


def test_one_steps_table_lists_its_critical_path(rollmill: Command, timed_run: RunFolder) -> None:
    lines = [
        " ".join(line.split()) for line in rollmill("spans", timed_run.location, "--step", "1").splitlines()
    ]
    assert "timed, step 1: 10.00 s, by what decided it" in lines
    assert "6.200 2.300 train forward trainer/1 main" in lines


def test_json_has_every_step_and_owner_and_the_whole_path(rollmill: Command, timed_run: RunFolder) -> None:
    values = json.loads(rollmill("spans", timed_run.location, "--json"))
    assert [each["seconds"] for each in values["steps"]] == [10.0] * 3
    assert sum(each["seconds"] for each in values["critical_path"]) == pytest.approx(30.0)
    assert sum(each["share"] for each in values["line"]) == pytest.approx(1.0)
    assert values["balance"]["ratio"] == pytest.approx(5.0 / 2.6)


def test_a_run_from_before_spans_says_so(rollmill: Command) -> None:
    assert "no spans are stored of it" in rollmill("spans", "small")


def test_a_step_that_is_not_there_names_those_that_are(rollmill: Command, timed_run: RunFolder) -> None:
    assert "it has spans of steps 0 to 2" in rollmill("spans", timed_run.location, "--step", "7")
