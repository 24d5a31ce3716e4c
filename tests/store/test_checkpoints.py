"""Checkpoints of a run on S3: uploaded with the marker last, fetched where they are missing."""

from pathlib import Path

import pytest

from tasks.errors import LeaseLostError, ShardError
from tasks.store.checkpoints import fetch_checkpoint, is_complete, upload_checkpoint
from tasks.store.config import StoreConfig
from tasks.store.filesystem import files_of, publish_text
from tasks.store.layout import CHECKPOINT_MARKER, SCRATCH_ENV, RunFolder, checkpoint_key
from tasks.store.resume import complete_checkpoints
from tasks.store.run import OpenRun


def written(folder: RunFolder, version: int, weights: bytes = b"weights") -> Path:
    """A checkpoint as the trainer leaves it on its disk."""
    local = folder.checkpoint(version)
    (local / "state").mkdir(parents=True)
    (local / "state" / "rank_0.pt").write_bytes(weights)
    (local / CHECKPOINT_MARKER).write_text(f'{{"version": {version}, "weights": "{weights!r}"}}')
    return local


@pytest.fixture
def run(s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv(SCRATCH_ENV, str(tmp_path / "scratch"))
    folder = RunFolder(f"{s3_root}/run")
    loaded(folder).close()
    return folder


def loaded(folder: RunFolder) -> OpenRun:
    """The run, opened once more, with one more trainer that has loaded it."""
    config_of = StoreConfig(lock_timeout_s=0.0)
    run = OpenRun.open(folder, config={"steps": 1}, fixed={}, versions={}, git_commit="", config_of=config_of)
    run.next_incarnation()
    return run


def test_a_checkpoint_is_the_same_on_another_machine(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = written(run, 4)
    assert not is_complete(run, 4)
    upload_checkpoint(run, 4, incarnation=1)
    assert complete_checkpoints(run) == [4]
    monkeypatch.setenv(SCRATCH_ENV, str(tmp_path / "elsewhere"))
    there = fetch_checkpoint(run.path(checkpoint_key(4)))
    assert there != here
    contents = [
        {each.name: each.read_bytes() for each in at.rglob("*.*") if each.is_file()} for at in (here, there)
    ]
    assert contents[0] == contents[1]


def test_what_a_killed_upload_left_is_no_checkpoint_and_is_gone_with_the_next_one(run: RunFolder) -> None:
    publish_text(files_of(run), f"{checkpoint_key(4)}/state/rank_1.pt", b"of other ranks")
    assert complete_checkpoints(run) == []
    with pytest.raises(ShardError, match=r"COMPLETE\.json: there is no such object"):
        fetch_checkpoint(run.path(checkpoint_key(4)))
    written(run, 4)
    upload_checkpoint(run, 4, incarnation=1)
    names = files_of(run).keys(f"{checkpoint_key(4)}/**")
    assert [each.rpartition("/")[2] for each in names] == [CHECKPOINT_MARKER, "rank_0.pt"]


def test_a_copy_that_is_not_the_stored_one_is_fetched_again(run: RunFolder) -> None:
    local = written(run, 4)
    upload_checkpoint(run, 4, incarnation=1)
    (local / "state" / "rank_0.pt").write_bytes(b"of this machine")
    location = run.path(checkpoint_key(4))
    assert (fetch_checkpoint(location) / "state" / "rank_0.pt").read_bytes() == b"of this machine"
    (local / CHECKPOINT_MARKER).write_text("{}")
    assert (fetch_checkpoint(location) / "state" / "rank_0.pt").read_bytes() == b"weights"


def test_a_machine_keeps_no_more_than_the_last_copy(run: RunFolder) -> None:
    for version in (2, 4):
        written(run, version)
        upload_checkpoint(run, version, incarnation=1)
    assert [each.name for each in (run.local / "checkpoints").iterdir()] == ["version=000004"]
    fetch_checkpoint(run.path(checkpoint_key(2)))
    assert [each.name for each in (run.local / "checkpoints").iterdir()] == ["version=000002"]


def test_a_trainer_leaves_the_checkpoint_of_a_newer_one_as_it_is(run: RunFolder) -> None:
    written(run, 4)
    loaded(run).close()
    upload_checkpoint(run, 4, incarnation=2)
    stored = files_of(run).sizes(f"{checkpoint_key(4)}/**")
    local = run.checkpoint(4)
    (local / "state" / "rank_1.pt").write_bytes(b"of the older one")
    with pytest.raises(LeaseLostError, match=r"incarnation 1: one of incarnation 2 has loaded the run"):
        upload_checkpoint(run, 4, incarnation=1)
    assert files_of(run).sizes(f"{checkpoint_key(4)}/**") == stored


def test_checkpoints_of_a_run_on_a_disk_stay_where_they_are(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    local = written(run, 4)
    upload_checkpoint(run, 4, incarnation=1)
    assert fetch_checkpoint(run.path(checkpoint_key(4))) == local
    assert is_complete(run, 4)
