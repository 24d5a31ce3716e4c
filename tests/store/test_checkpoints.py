"""Checkpoints of a run on S3: uploaded file by file, the marker last; fetched where they are missing; old ones go."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.tasks.errors import LeaseLostError, ShardError, StoreError
from rollmill.tasks.store.checkpoints.checkpoint_marker import check_files, describe_file
from rollmill.tasks.store.checkpoints.checkpoint_retention import (
    remove_checkpoints,
    select_expired_checkpoints,
)
from rollmill.tasks.store.checkpoints.checkpoint_store import (
    clear_checkpoint,
    copy_checkpoint,
    fetch_checkpoint,
    has_checkpoint,
    upload_checkpoint_file,
)
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import open_files, publish_text
from rollmill.tasks.store.folders import CHECKPOINT_MARKER, SCRATCH_ENV, RunFolder, checkpoint_key
from rollmill.tasks.store.run.resume import list_checkpoints, list_complete_checkpoints
from rollmill.tasks.store.run.writable_run import OpenRun

FILE = "rank-00000-of-00001.safetensors"


def write_checkpoint(
    folder: RunFolder, version: int, incarnation: int = 1, weights: bytes = b"weights"
) -> Path:
    """A checkpoint as a trainer of one rank leaves it on its disk, and on S3."""
    clear_checkpoint(folder, version, incarnation)
    local = folder.checkpoint(version)
    (local / FILE).write_bytes(weights)
    upload_checkpoint_file(folder, version, FILE, incarnation)
    assert not has_checkpoint(folder, version)
    files = {FILE: describe_file(local / FILE).model_dump()}
    (local / CHECKPOINT_MARKER).write_text(json.dumps({"version": version, "files": files}))
    upload_checkpoint_file(folder, version, CHECKPOINT_MARKER, incarnation)
    return local


@pytest.fixture
def run(s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv(SCRATCH_ENV, str(tmp_path / "scratch"))
    folder = RunFolder(f"{s3_root}/run")
    reopen(folder).close()
    return folder


def reopen(folder: RunFolder) -> OpenRun:
    """The run, opened once more, with one more trainer that has loaded it."""
    config_of = StoreConfig()
    run = OpenRun.open(folder, config={"steps": 1}, fixed={}, versions={}, git_commit="", config_of=config_of)
    run.next_incarnation()
    return run


@pytest.mark.slow
def test_a_checkpoint_is_the_same_on_another_machine(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = write_checkpoint(run, 4)
    assert list_complete_checkpoints(run) == [4]
    monkeypatch.setenv(SCRATCH_ENV, str(tmp_path / "elsewhere"))
    there = fetch_checkpoint(run.path(checkpoint_key(4)))
    assert there != here
    contents = [{each.name: each.read_bytes() for each in at.iterdir()} for at in (here, there)]
    assert contents[0] == contents[1]


def test_a_killed_uploads_files_are_no_checkpoint_and_the_next_upload_removes_them(run: RunFolder) -> None:
    publish_text(open_files(run), f"{checkpoint_key(4)}/rank-00001-of-00002.safetensors", b"of other ranks")
    assert list_complete_checkpoints(run) == []
    with pytest.raises(ShardError, match=r"COMPLETE\.json: there is no such object"):
        fetch_checkpoint(run.path(checkpoint_key(4)))
    write_checkpoint(run, 4)
    names = open_files(run).keys(f"{checkpoint_key(4)}/**")
    assert [each.rpartition("/")[2] for each in names] == [CHECKPOINT_MARKER, FILE]


def test_a_wrong_copy_and_a_locally_missing_file_are_fetched(
    run: RunFolder,
) -> None:
    local = write_checkpoint(run, 4)
    (local / FILE).write_bytes(b"changed")
    location = run.path(checkpoint_key(4))
    assert (fetch_checkpoint(location) / FILE).read_bytes() == b"changed"
    (local / FILE).unlink()  # another machine's rank wrote it
    assert (fetch_checkpoint(location) / FILE).read_bytes() == b"weights"
    (local / FILE).write_bytes(b"changed")
    (local / CHECKPOINT_MARKER).write_text("{}")
    assert (fetch_checkpoint(location) / FILE).read_bytes() == b"weights"


def test_a_machine_keeps_no_more_than_the_last_copy(run: RunFolder) -> None:
    for version in (2, 4):
        write_checkpoint(run, version)
    assert [each.name for each in (run.local / "checkpoints").iterdir()] == ["version=000004"]
    fetch_checkpoint(run.path(checkpoint_key(2)))
    assert [each.name for each in (run.local / "checkpoints").iterdir()] == ["version=000002"]


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"weights")
    recorded = {FILE: describe_file(tmp_path / FILE)}
    check_files(tmp_path, recorded)
    (tmp_path / FILE).write_bytes(b"wEights")
    with pytest.raises(StoreError, match=rf"{FILE}: its bytes are not those that were written"):
        check_files(tmp_path, recorded)
    check_files(tmp_path, recorded, reads_bytes=False)


def test_a_concurrent_reader_leaves_the_checkpoint_that_the_trainer_is_writing(
    run: RunFolder, tmp_path: Path
) -> None:
    write_checkpoint(run, 4)
    clear_checkpoint(run, 8, 1)
    unfinished = run.checkpoint(8) / FILE
    unfinished.write_bytes(b"half")
    copy = copy_checkpoint(run.path(checkpoint_key(4)), tmp_path / "copy")
    assert (copy / FILE).read_bytes() == b"weights"
    assert (copy / CHECKPOINT_MARKER).is_file()
    assert unfinished.read_bytes() == b"half"


def test_a_trainer_does_not_change_the_checkpoint_of_a_newer_one(run: RunFolder) -> None:
    reopen(run).close()
    write_checkpoint(run, 4, incarnation=2)
    stored = open_files(run).sizes(f"{checkpoint_key(4)}/**")
    with pytest.raises(LeaseLostError, match=r"incarnation 1: one of incarnation 2 has loaded the run"):
        upload_checkpoint_file(run, 4, FILE, incarnation=1)
    with pytest.raises(LeaseLostError, match=r"incarnation 1: one of incarnation 2 has loaded the run"):
        clear_checkpoint(run, 4, incarnation=1)
    assert open_files(run).sizes(f"{checkpoint_key(4)}/**") == stored


def test_checkpoints_of_a_run_on_a_disk_stay_where_they_are(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    local = write_checkpoint(run, 4)
    assert fetch_checkpoint(run.path(checkpoint_key(4))) == local
    assert has_checkpoint(run, 4)


@given(st.sets(st.integers(0, 200)), st.integers(0, 5), st.integers(0, 20))
def test_the_newest_and_every_nth_are_kept(complete: set[int], keep: int, keep_every: int) -> None:
    gone = select_expired_checkpoints(sorted(complete), keep=keep, keep_every=keep_every)
    for version in complete:
        n_newer = sum(each > version for each in complete)
        is_nth = keep_every > 0 and version % keep_every == 0
        assert (version not in gone) == (keep == 0 or n_newer < keep or is_nth)


@pytest.mark.parametrize("is_on_s3", [False, True])
def test_old_checkpoints_and_leftovers_of_killed_writers_are_removed(
    is_on_s3: bool, run: RunFolder, tmp_path: Path
) -> None:
    folder = run if is_on_s3 else RunFolder(tmp_path / "run")
    folder.tmp.mkdir(parents=True, exist_ok=True)
    for version in (2, 4, 6, 8):
        write_checkpoint(folder, version)
    publish_text(open_files(folder), f"{checkpoint_key(3)}/{FILE}", b"unfinished")
    publish_text(open_files(folder), f"{checkpoint_key(9)}/{FILE}", b"being written")
    assert remove_checkpoints(folder, open_files(folder), keep=2, keep_every=4) == [2, 3]
    assert list_complete_checkpoints(folder) == [4, 6, 8]
    assert list_checkpoints(folder) == [4, 6, 8, 9]
    assert remove_checkpoints(folder, open_files(folder), keep=2, keep_every=4) == []


def test_checkpoints_are_listed_while_others_are_removed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    files = open_files(folder)

    def write_and_remove() -> None:
        for version in range(400):
            (folder.checkpoint(version) / "state").mkdir(parents=True)
            shutil.rmtree(folder.checkpoint(version))

    with ThreadPoolExecutor() as pool:
        removing = pool.submit(write_and_remove)
        while not removing.done():
            assert set(list_checkpoints(folder)) <= set(range(400))
            assert files.sizes("checkpoints/**/*") == {}
        removing.result()
