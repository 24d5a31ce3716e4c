"""Opening a run's folder: create, resume, refuse."""

import errno
import json
import os
import pickle
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rollmill.tasks.errors import ConfigError, RunFinishedError, RunLockedError, RunMismatchError, StoreError
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import open_files, publish_text, read_text
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.run import writable_run
from rollmill.tasks.store.run.immutable_settings import list_changes
from rollmill.tasks.store.run.lock import is_written_to, lock_run, unwritable_error
from rollmill.tasks.store.run.manifest import has_manifest, read_manifest
from rollmill.tasks.store.run.step_settings import list_setting_changes
from rollmill.tasks.store.run.writable_run import OpenRun

RowMaker = Callable[..., pa.RecordBatch]
CONFIG = {"seed": 0, "steps": 4, "train": {"lr": 1e-3, "dtype": "fp32"}}


BY_STEP = {"train.lr": 1e-6, "train.loss": "ppo_clip"}


def open_run(root: str | Path, config: dict[str, Any] = CONFIG) -> OpenRun:
    return OpenRun.open(
        RunFolder(f"{root}/a"),
        config=config,
        fixed={"seed": 0, "train.dtype": "fp32"},
        versions={"rollmill": "0.1"},
        git_commit="abc",
        config_of=StoreConfig(root=str(root)),
        by_step=BY_STEP,
    )


def test_a_new_run_has_a_random_id_and_its_settings_in_run_json(root: str) -> None:
    assert not has_manifest(RunFolder(f"{root}/a"))
    with open_run(root) as run, open_run(f"{root}/other") as other:
        assert run.manifest.run != other.manifest.run
        assert (run.manifest.epoch, run.manifest.incarnation, run.manifest.status) == (1, 0, "running")
        stored = json.loads(read_text(open_files(run.folder), "run.json"))
        assert stored["config"] == CONFIG
        assert stored["git_commit"] == "abc"
        assert read_manifest(run.folder) == run.manifest


def test_a_reopened_run_keeps_its_id_raises_its_epoch_and_has_the_new_settings(root: str) -> None:
    with open_run(root) as run:
        first = run.manifest
    with open_run(root, CONFIG | {"steps": 8}) as run:
        assert (run.manifest.run, run.manifest.created_at) == (first.run, first.created_at)
        assert run.manifest.epoch == 2
        assert read_manifest(run.folder).config["steps"] == 8


async def test_two_writers_of_one_run_never_write_the_same_shard(root: str, rows: RowMaker) -> None:
    for group in (0, 1):
        with open_run(root) as run:
            async with run.writer:
                run.writer.append("rollouts", rows("rollouts", step=0, group=group), step=0)
    assert read(RunFolder(f"{root}/a"), "rollouts", ["group"])["group"].to_pylist() == [0, 1]


def test_incarnations_rise_over_the_runs_whole_life(root: str) -> None:
    with open_run(root) as run:
        assert [run.next_incarnation(), run.next_incarnation()] == [1, 2]
    with open_run(root) as run:
        assert run.next_incarnation() == 3
        assert read_manifest(run.folder).incarnation == 3


def test_a_run_open_elsewhere_is_refused_naming_the_process(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writable_run, "lock_run", partial(lock_run, timeout_s=0.0))
    with (
        open_run(root),
        pytest.raises(RunLockedError, match=f"a is being written to by process {os.getpid()} on "),
    ):
        open_run(root)
    open_run(root).close()


def test_a_run_waits_for_the_lock_up_to_its_timeout(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first = lock_run(folder, StoreConfig(), timeout_s=0.0)
    child = os.fork()
    if child == 0:
        with suppress(RunLockedError):
            lock_run(folder, StoreConfig(), timeout_s=30.0)
            os._exit(0)
        os._exit(1)
    first.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def count_open(path: Path) -> int:
    """Count this process's descriptors of a file."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += each.readlink() == path
    return found


def test_who_waits_for_a_run_that_is_renamed_locks_the_folder_of_its_name(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a")
    first = lock_run(folder, StoreConfig(), timeout_s=0.0)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lock_run, folder, StoreConfig(), timeout_s=30.0)
        while count_open(folder.lock) < 2:
            pass
        folder.local.rename(tmp_path / "a-1")
        first.release()
        second = waiting.result()
    assert is_written_to(folder)
    assert not is_written_to(RunFolder(tmp_path / "a-1"))
    second.release()


def test_a_forked_child_that_outlives_a_killed_owner_does_not_hold_its_lock(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    read_end, write_end = os.pipe()
    owner = os.fork()
    if owner == 0:
        held = lock_run(folder, StoreConfig(), timeout_s=0.0)
        if os.fork() == 0:
            os.write(write_end, str(os.getpid()).encode())  # from the child: the fork is complete for it too
        signal.pause()
        held.release()
        os._exit(0)
    grandchild = int(os.read(read_end, 20))
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    try:
        lock_run(folder, StoreConfig(), timeout_s=0.0).release()
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_leftovers_of_a_killed_writer_are_removed_and_never_read(root: str) -> None:
    with open_run(root) as run:
        (run.folder.tmp / "0a-000001-000000.arrow").write_bytes(b"ARROW1 and then the power went")
        (run.folder.tmp / "checkpoint").mkdir()
        assert read(run.folder, "rollouts").num_rows == 0
    with open_run(root) as run:
        assert list(run.folder.tmp.iterdir()) == []


def test_every_fixed_setting_that_differs_is_shown_with_both_values(root: str) -> None:
    open_run(root).close()
    with pytest.raises(RunMismatchError) as caught:
        open_run(root, {"seed": 1, "steps": 4, "train": {"lr": 1e-6, "dtype": "bf16"}})
    text = str(caught.value)
    assert "seed: the run has 0, given is 1" in text
    assert "train.dtype: the run has 'fp32', given is 'bf16'" in text
    assert "another name" in text
    assert "lr" not in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
    open_run(root).close()


def test_a_fixed_setting_that_is_newer_than_the_run_has_its_default_there(root: str) -> None:
    older = {"seed": 0, "steps": 4}
    open_run(root, older).close()
    open_run(root).close()
    open_run(root, older).close()
    with pytest.raises(RunMismatchError, match=r"train\.dtype: the run has 'fp32', given is 'bf16'"):
        open_run(root, older | {"train": {"dtype": "bf16"}})


def test_a_finished_run_is_refused_until_it_is_given_more_steps(root: str) -> None:
    with open_run(root) as run:
        run.finish()
    with pytest.raises(RunFinishedError, match="done all its 4 steps; raise steps"):
        open_run(root)
    with open_run(root, CONFIG | {"steps": 5}) as run:
        assert run.manifest.status == "running"


def test_a_reader_sees_whether_a_run_is_written_to(root: str) -> None:
    run = open_run(root)
    assert is_written_to(run.folder)
    run.close()
    assert not is_written_to(run.folder)
    assert not is_written_to(RunFolder(f"{root}/none"))


def test_a_path_that_cannot_be_written_is_a_wrong_setting_that_names_store_root(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where a folder should be")
    with pytest.raises(ConfigError, match=r"store\.root = .*runs.*cannot be written: Not a directory"):
        open_run(tmp_path / "runs")


def test_a_full_disk_is_no_wrong_setting(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "lock"))
    error = unwritable_error(full, RunFolder(tmp_path), "runs")
    assert isinstance(error, StoreError)
    assert str(error) == f"cannot write {tmp_path}/lock: No space left on device"


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "damaged"), ("{", "damaged"), ('{"run": 7}', "run.json is damaged: run: "), ("[]", "damaged")],
)
def test_a_damaged_run_json_is_an_error_that_names_it(root: str, text: str, reason: str) -> None:
    open_run(root).close()
    publish_text(open_files(RunFolder(f"{root}/a")), "run.json", text.encode())
    with pytest.raises(StoreError, match=reason):
        open_run(root)


@pytest.mark.parametrize(("version", "remedy"), [(99, "a newer"), (1, "an older")])
def test_a_run_of_another_schema_version_is_refused(root: str, version: int, remedy: str) -> None:
    with open_run(root) as run:
        files = run.files
        text = read_text(files, "run.json").replace(b'"schema_version": 5', b'"schema_version": %d' % version)
        publish_text(files, "run.json", text)
    with pytest.raises(
        StoreError, match=f"schema version {version}, and this Rollmill reads 2 to 5; use {remedy} one"
    ):
        read_manifest(run.folder)


def test_a_folder_with_data_sets_and_no_run_json_is_no_new_run(root: str) -> None:
    folder = RunFolder(f"{root}/a")
    folder.tmp.mkdir(parents=True)
    publish_text(open_files(folder), "rollouts/step=000000/some.arrow", b"rows")
    with pytest.raises(StoreError, match=r"data sets \(rollouts\) but no run\.json"):
        open_run(root)


def test_a_folder_without_a_run_is_an_error_that_names_it(root: str) -> None:
    with pytest.raises(StoreError, match=r"holds no run: there is no run\.json"):
        read_manifest(RunFolder(f"{root}/nowhere"))
    assert open_files(RunFolder(f"{root}/nowhere")).keys("**/*.arrow") == []


def test_changed_settings_are_listed_by_their_dotted_name_and_those_of_other_versions_left_out() -> None:
    stored = {"steps": 2, "train": {"lr": 1e-6, "clip": {"low": 0.2}, "gone": 1}, "seed": 0}
    given = {"steps": 40, "train": {"lr": 1e-6, "clip": {"low": 0.1}, "new": 2}, "seed": 0}
    assert list_changes(stored, given) == ["steps: 2 -> 40", "train.clip.low: 0.2 -> 0.1"]
    assert list_changes(given, given) == []


async def train_under(root: str, rows: RowMaker, rate: float, *steps: int) -> OpenRun:
    """Open the run with a learning rate, and store the batches of some steps."""
    with open_run(root, CONFIG | {"train": {"lr": rate, "dtype": "fp32"}}) as run:
        async with run.writer:
            for step in steps:
                run.writer.append("batches", rows("batches", step=step), step=step)
    return run


def rates_of(run: OpenRun) -> list[tuple[int, float]]:
    """Until which step the run had which earlier learning rate."""
    stored = read_manifest(run.folder)
    assert stored == run.manifest
    return [(each.until_step, each.settings["train.lr"]) for each in stored.earlier_settings]


async def test_changed_settings_hold_from_the_first_step_without_a_batch(root: str, rows: RowMaker) -> None:
    run = await train_under(root, rows, 0.1, 0, 1)
    assert rates_of(run) == []
    run = await train_under(root, rows, 0.2, 2)
    assert rates_of(run) == [(2, 0.1)]
    run = await train_under(root, rows, 0.3)
    assert rates_of(run) == [(2, 0.1), (3, 0.2)]
    assert [run.manifest.find_settings(step, BY_STEP)["train.lr"] for step in range(5)] == [
        0.1,
        0.1,
        0.2,
        0.3,
        0.3,
    ]
    assert list_setting_changes(run.manifest.earlier_settings, run.manifest.config) == {
        2: ["train.lr: 0.1 -> 0.2"],
        3: ["train.lr: 0.2 -> 0.3"],
    }


async def test_settings_that_no_step_was_trained_under_are_not_recorded(root: str, rows: RowMaker) -> None:
    await train_under(root, rows, 0.3)
    assert rates_of(await train_under(root, rows, 0.1, 0, 1)) == []
    await train_under(root, rows, 0.2)
    assert rates_of(await train_under(root, rows, 0.3)) == [(2, 0.1)]
    assert rates_of(await train_under(root, rows, 0.1)) == []


async def test_a_setting_that_is_newer_than_a_run_had_its_default(root: str, rows: RowMaker) -> None:
    await train_under(root, rows, 0.1, 0)
    given = CONFIG | {"train": {"lr": 0.1, "dtype": "fp32", "loss": "cispo"}}
    with open_run(root, given) as run:
        (kept,) = run.manifest.earlier_settings
    assert (kept.until_step, kept.settings) == (1, {"train.lr": 0.1, "train.loss": "ppo_clip"})


async def test_the_run_json_of_a_run_without_records_is_read(root: str, rows: RowMaker) -> None:
    run = await train_under(root, rows, 0.1, 0)
    stored = json.loads(read_text(open_files(run.folder), "run.json"))
    del stored["earlier_settings"]
    publish_text(open_files(run.folder), "run.json", json.dumps(stored).encode())
    assert read_manifest(run.folder).find_settings(0, BY_STEP)["train.lr"] == 0.1
    assert rates_of(await train_under(root, rows, 0.2)) == [(1, 0.1)]
