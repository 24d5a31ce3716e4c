"""A run on S3 is looked at as one on a disk."""

import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_shards

Command = Callable[..., str]


@pytest.mark.slow
def test_every_look_at_a_run_on_s3_is_that_of_the_same_run_on_a_disk(
    small_run_on_s3: RunFolder, rollmill: Command, tmp_path: Path
) -> None:
    there, here = small_run_on_s3.location, "small"
    for words in (
        [],
        ["--step", "1"],
        ["--trajectories", "--sort", "-reward"],
        ["--evaluations", "--step", "3"],
    ):
        shown = [json.loads(rollmill("inspect", run, "--json", *words)) for run in (there, here)]
        assert [each.pop("run", "") for each in shown] in ([there, "runs/small"], ["", ""])
        assert shown[0] == shown[1]
    for words in (["6.0", "--tokens"], ["v3.1.greedy"]):
        assert rollmill("show", there, *words) == rollmill("show", here, *words)
    for run, output in ((there, "there"), (here, "here")):
        rollmill("export", run, "--to", "jsonl", "--output", str(tmp_path / output))
    for file in (tmp_path / "here").iterdir():
        lines = [
            sorted((tmp_path / output / file.name).read_text().splitlines()) for output in ("here", "there")
        ]
        assert lines[0] == lines[1]
    assert Path(rollmill("plot", there).strip()).stat().st_size > 0


def test_a_place_on_s3_without_a_run_is_refused(rollmill: Command, s3_root: str) -> None:
    assert "run.json is missing" in rollmill("inspect", f"{s3_root}/nothing")


def test_shards_on_s3_are_read_by_polars_and_pyarrow_by_their_names(
    small_run_on_s3: RunFolder, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.dataset as ds
    import s3fs

    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    names = list_shards(small_run_on_s3, "rollouts")
    assert pl.scan_ipc(names).select(pl.col("trajectory_id").n_unique(), pl.len()).collect().row(0) == (
        48,
        48,
    )
    keys = [name.removeprefix("s3://") for name in names]
    assert ds.dataset(keys, format="ipc", filesystem=s3fs.S3FileSystem()).count_rows() == 48
