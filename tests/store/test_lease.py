"""The lock of a run on S3: held by renewal, refused to others, taken over from the dead, lost by the suspended."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from s3_proxy import FailingProxy

from rollmill.tasks.errors import LeaseLostError, RunLockedError, StoreError
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import open_files, publish_text, read_text
from rollmill.tasks.store.folders import SCRATCH_ENV, RunFolder
from rollmill.tasks.store.run.lock import RunLock, lock_run
from rollmill.tasks.store.run.manifest import read_manifest, write_manifest
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.s3 import s3_objects
from rollmill.tasks.store.s3.s3_lease import CLOCK_RESOLUTION_S, LOCK_KEY, LeaseRecord

REPOSITORY = Path(__file__).parents[2]
LEASE_S = 4.0

HOLDER = """
import sys
from rollmill.tasks.errors import RollmillError
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import open_files, publish_text
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.lock import lock_run

folder = RunFolder(sys.argv[1])
lock = lock_run(folder, StoreConfig(), lease_s=float(sys.argv[2]))
print("held", flush=True)
for line in sys.stdin:
    try:
        publish_text(open_files(folder, lock.check), line.strip(), b"written")
        print("written", flush=True)
    except RollmillError as error:
        print(type(error).__name__, error, flush=True)
"""


@pytest.fixture
def run(s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv(SCRATCH_ENV, str(tmp_path / "scratch"))
    return RunFolder(f"{s3_root}/run")


def lock_folder(run: RunFolder, timeout_s: float = 0.0, lease_s: float = LEASE_S) -> RunLock:
    return lock_run(run, StoreConfig(), lease_s=lease_s, timeout_s=timeout_s)


@contextmanager
def holder(run: RunFolder, lease_s: float = LEASE_S) -> Iterator["subprocess.Popen[str]"]:
    """Start another process that holds a run, and writes the lines that it receives."""
    command = [sys.executable, "-c", HOLDER, run.location, str(lease_s)]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert answer(process) == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def check_for_half_a_minute(lock: RunLock) -> None:
    for _ in range(600):
        time.sleep(0.05)
        lock.check()


def answer(process: "subprocess.Popen[str]", line: str = "") -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    if line:
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
    return process.stdout.readline()


def test_a_run_that_is_held_is_refused_naming_its_holder_and_free_once_given_back(run: RunFolder) -> None:
    with holder(run) as other:
        with pytest.raises(RunLockedError, match=rf"run is being written to by process {other.pid} on "):
            lock_folder(run)
        assert answer(other, "a") == "written\n"
    first = lock_folder(run)
    with pytest.raises(RunLockedError, match=f"process {os.getpid()} "):
        lock_folder(run)
    first.release()
    first.release()
    lock_folder(run).release()


@pytest.mark.slow
def test_the_run_of_a_process_that_was_killed_on_this_machine_is_free_at_once(run: RunFolder) -> None:
    with holder(run, lease_s=3600.0) as other:
        os.kill(other.pid, signal.SIGKILL)
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        lock_folder(run).release()


@pytest.mark.slow
def test_a_holder_that_lives_keeps_the_run_beyond_its_lease(run: RunFolder) -> None:
    with holder(run) as other:
        with pytest.raises(RunLockedError):
            lock_folder(run, timeout_s=2 * LEASE_S + CLOCK_RESOLUTION_S)
        assert answer(other, "a") == "written\n"


@pytest.mark.slow
def test_a_suspended_holder_loses_the_run_and_then_writes_nothing(run: RunFolder) -> None:
    with holder(run) as other:
        os.kill(other.pid, signal.SIGSTOP)
        ours = lock_folder(run, timeout_s=60.0)
        publish_text(open_files(run, ours.check), "ours", b"")
        os.kill(other.pid, signal.SIGCONT)
        refused = answer(other, "theirs")
        assert refused.startswith("LeaseLostError ")
        assert f"process {os.getpid()} on " in refused
        assert open_files(run).keys("*") == [LOCK_KEY, "ours"]
        ours.check()
        ours.release()


def test_a_holder_whose_machine_slept_asks_for_its_lease_before_it_writes(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = lock_folder(run, lease_s=3600.0)
    open_files(run).remove([LOCK_KEY])
    ours.check()
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: now + 7200.0)
    with pytest.raises(LeaseLostError):
        ours.check()


def open_run(run: RunFolder, steps: int = 1) -> OpenRun:
    settings = {"config": {"steps": steps}, "fixed": {}, "versions": {}, "git_commit": ""}
    return OpenRun.open(run, **settings, config_of=StoreConfig())


def take_over(run: RunFolder) -> OpenRun:
    """The run, opened by another who holds it by now, though the first one's lease has not run out by its own clock."""
    open_files(run).remove([LOCK_KEY])
    return open_run(run, steps=2)


def test_a_former_holder_does_not_replace_the_lock_of_the_new_one(run: RunFolder) -> None:
    first = open_run(run)
    second = take_over(run)
    second.next_incarnation()
    for change in (first.next_incarnation, first.finish):
        with pytest.raises(LeaseLostError, match=r"run\.json is not written: another process has taken"):
            change()
    assert read_manifest(run) == second.manifest
    second.finish()
    assert read_manifest(run).status == "finished"
    second.close()


def test_of_two_processes_one_creates_a_new_run(run: RunFolder) -> None:
    with open_run(run) as first:
        with pytest.raises(LeaseLostError):
            write_manifest(first.files, first.manifest, None)
        assert read_manifest(run) == first.manifest


def test_a_writer_whose_lock_was_removed_stops(run: RunFolder) -> None:
    ours = lock_folder(run)
    open_files(run).remove([LOCK_KEY])
    with pytest.raises(LeaseLostError, match="has removed its lock"):
        check_for_half_a_minute(ours)
    ours.release()
    assert open_files(run).keys("*") == []


@pytest.mark.slow
def test_an_outage_beyond_the_lease_stops_writing_and_ends_without_a_loss(
    run: RunFolder, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FailingProxy(s3_endpoint, 0.0).running() as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        fresh()
        ours = lock_folder(run)
        proxy.share = 1.0
        with pytest.raises(StoreError, match=r"cannot write s3://.*/run/lock"):
            check_for_half_a_minute(ours)
        proxy.share = 0.0
        ours.check()
        ours.release()
    monkeypatch.undo()
    fresh()


def fresh() -> None:
    """Let requests be made as in a process begun with the environment as it is now."""
    s3_objects._filesystem.cache_clear()
    s3_objects._read_attempts.cache_clear()


def test_an_answer_that_was_lost_is_no_lost_lease(run: RunFolder) -> None:
    ours = lock_folder(run, lease_s=3600.0)
    files = open_files(run)
    terms = LeaseRecord.model_validate_json(read_text(files, LOCK_KEY))
    as_if_unanswered = terms.model_copy(update={"renewals": terms.renewals + 1})
    publish_text(files, LOCK_KEY, as_if_unanswered.model_dump_json().encode())
    ours._renew()  # type: ignore[attr-defined]
    assert LeaseRecord.model_validate_json(read_text(files, LOCK_KEY)).renewals == terms.renewals + 2
    ours.release()


def test_a_forked_child_neither_holds_nor_gives_back_the_run_of_its_parent(run: RunFolder) -> None:
    ours = lock_folder(run)
    child = os.fork()
    if child == 0:
        try:
            ours.check()
        except LeaseLostError:
            ours.release()
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(RunLockedError):
        lock_folder(run)
    ours.release()


def test_an_unreadable_lock_is_replaced(run: RunFolder) -> None:
    publish_text(open_files(run), LOCK_KEY, b"{}")
    lock_folder(run).release()
