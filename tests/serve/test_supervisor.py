"""However an owner ends, nothing that it launched lives on."""

import asyncio
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollmill.tasks.processes.launched_process import LaunchedProcess, free_port
from rollmill.tasks.processes.supervisor import descendants

FAMILY = """
import os, subprocess, sys, time
from pathlib import Path

def leave_pid(name):
    Path(folder, name + ".tmp").write_text(str(os.getpid()))
    Path(folder, name + ".tmp").rename(Path(folder, name))

folder, role = sys.argv[1:3]
if role == "child":
    subprocess.Popen([sys.executable, __file__, folder, "grandchild"])
    subprocess.Popen([sys.executable, __file__, folder, "in_other_session"], start_new_session=True)
    middle = subprocess.Popen([sys.executable, __file__, folder, "middle"])
    middle.wait()
if role == "middle":
    subprocess.Popen([sys.executable, __file__, folder, "orphan"], start_new_session=True)
    sys.exit()
if role in ("grandchild", "orphan"):
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
leave_pid(role)
time.sleep(600)
"""
MEMBERS = ("child", "grandchild", "in_other_session", "orphan")

OWNER = """
import asyncio, os, subprocess, sys, time
from pathlib import Path
from rollmill.tasks.processes.launched_process import LaunchedProcess

folder, *command = sys.argv[1:]
process = LaunchedProcess.start("family", command, log=Path(folder, "log"), stop_grace_s=0.3)
{between}
Path(folder, "ready").touch()
{then}
"""
WAIT_S = 30.0


class Family:
    """A child with a grandchild, one in a separate session, and one whose parent has ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        script = folder / "family.py"
        script.write_text(FAMILY)
        self.command = [sys.executable, str(script), str(folder), "child"]

    def wait_until_up(self) -> list[int]:
        files = [self.folder / member for member in MEMBERS]
        _wait_until(lambda: all(file.exists() for file in files))
        self.pids = [int(file.read_text()) for file in files]
        assert all(_is_alive(pid) for pid in self.pids)
        return self.pids

    def wait_until_gone(self) -> None:
        _wait_until(lambda: not any(_is_alive(pid) for pid in self.pids))

    def owned_by(self, *, between: str = "", then: str = "time.sleep(600)") -> subprocess.Popen[bytes]:
        """Start an owner that launches the family, does `between`, then `then`."""
        script = self.folder / "owner.py"
        script.write_text(OWNER.format(between=between, then=then))
        environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
        owner = subprocess.Popen(
            [sys.executable, str(script), str(self.folder), *self.command],
            env=environment,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        _wait_until((self.folder / "ready").exists)
        return owner


class CountingSelector(selectors.DefaultSelector):
    """Counts how often an event loop looked for something to do."""

    n_looks = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.n_looks += 1
        return super().select(timeout)


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    one = Family(tmp_path)
    yield one
    for pid in getattr(one, "pids", []):
        assert not _is_alive(pid)


def test_family_ends_when_its_owner_exits(family: Family) -> None:
    owner = family.owned_by(then="input()")
    family.wait_until_up()
    assert owner.stdin is not None
    owner.stdin.close()
    owner.wait(WAIT_S)
    family.wait_until_gone()


def test_family_ends_when_its_owner_is_killed(family: Family) -> None:
    owner = family.owned_by()
    family.wait_until_up()
    owner.kill()
    owner.wait(WAIT_S)
    family.wait_until_gone()


def test_family_ends_when_its_owner_is_interrupted(family: Family) -> None:
    owner = family.owned_by()
    family.wait_until_up()
    os.killpg(owner.pid, signal.SIGINT)
    owner.wait(WAIT_S)
    family.wait_until_gone()


def test_ctrl_c_does_not_reach_a_launched_process(family: Family) -> None:
    owner = family.owned_by(then="import signal; signal.signal(2, signal.SIG_IGN); time.sleep(600)")
    pids = family.wait_until_up()
    assert all(os.getpgid(pid) != owner.pid for pid in pids)
    owner.kill()
    owner.wait(WAIT_S)
    family.wait_until_gone()


def test_family_ends_with_its_owner_though_later_children_of_the_owner_live_on(family: Family) -> None:
    spawn = "later = subprocess.Popen(['sleep', '600'], close_fds=False)"
    fork = "forked = os.fork() or time.sleep(600)"
    leave = "Path(folder, 'later').write_text(f'{later.pid} {forked}')"
    owner = family.owned_by(between=f"{spawn}\n{fork}\n{leave}")
    family.wait_until_up()
    later = [int(pid) for pid in (family.folder / "later").read_text().split()]
    owner.kill()
    owner.wait(WAIT_S)
    try:
        family.wait_until_gone()
        assert all(_is_alive(pid) for pid in later)
    finally:
        for pid in later:
            os.kill(pid, signal.SIGKILL)


def test_a_process_outlives_the_thread_that_launched_it(family: Family) -> None:
    start = (
        "LaunchedProcess.start('in a thread', ['sleep', '600'], log=Path(folder, 'log'), stop_grace_s=0.3)"
    )
    between = f"import threading; made = []; one = threading.Thread(target=lambda: made.append({start}))\n"
    owner = family.owned_by(
        between=between + "one.start(); one.join(); time.sleep(0.5); assert made[0].is_running"
    )
    family.wait_until_up()
    owner.kill()
    owner.wait(WAIT_S)
    family.wait_until_gone()


async def test_stop_ends_the_family(family: Family) -> None:
    process = LaunchedProcess.start("family", family.command, log=family.folder / "log", stop_grace_s=0.3)
    pids = await asyncio.to_thread(family.wait_until_up)
    assert set(pids) <= set(descendants(process.pid))
    await process.stop()
    assert not any(_is_alive(pid) for pid in pids)
    assert not process.is_running
    await process.stop()
    process.stop_now()


def test_stop_now_ends_the_family(family: Family) -> None:
    process = LaunchedProcess.start("family", family.command, log=family.folder / "log", stop_grace_s=0.3)
    pids = family.wait_until_up()
    process.stop_now()
    assert not any(_is_alive(pid) for pid in pids)


async def test_what_a_command_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    command = ["sh", "-c", "setsid sleep 600 & echo $!; exit 3"]
    process = LaunchedProcess.start("shell", command, log=tmp_path / "log", stop_grace_s=5.0)
    assert await asyncio.wait_for(process.wait(), WAIT_S) == 3
    assert not _is_alive(int(process.log_tail()))


def start_held(folder: Path) -> tuple[LaunchedProcess, Callable[[], None]]:
    """A process that runs until the returned function is called."""
    command = ["sh", "-c", f"while [ -e {folder / 'is_held'} ]; do sleep 0.05; done"]
    (folder / "is_held").touch()
    process = LaunchedProcess.start("held", command, log=folder / "log", stop_grace_s=0.3)
    return process, (folder / "is_held").unlink


async def test_every_waiter_learns_of_the_end(tmp_path: Path) -> None:
    process, end = start_held(tmp_path)
    assert process.returncode is None
    waiters = asyncio.gather(process.wait(), process.wait())
    end()
    first, second = await asyncio.wait_for(waiters, WAIT_S)
    assert first == second == process.returncode == await process.wait() == 0


def test_waiting_for_the_end_polls_nothing(tmp_path: Path) -> None:
    process = LaunchedProcess.start("short", ["sleep", "0.5"], log=tmp_path / "log", stop_grace_s=0.3)
    selector = CountingSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        assert runner.run(process.wait()) == 0
        assert selector.n_looks < 10


async def test_a_cancelled_waiter_does_no_harm(tmp_path: Path) -> None:
    process, end = start_held(tmp_path)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(process.wait(), 0.05)
    end()
    assert await asyncio.wait_for(process.wait(), WAIT_S) == 0


async def test_a_command_ended_by_a_signal_says_so(tmp_path: Path) -> None:
    command = ["sh", "-c", "kill -SEGV $$"]
    process = LaunchedProcess.start("crash", command, log=tmp_path / "log", stop_grace_s=0.3)
    assert await asyncio.wait_for(process.wait(), WAIT_S) == 128 + signal.SIGSEGV


async def test_a_command_that_cannot_be_run_says_so_in_its_log(tmp_path: Path) -> None:
    process = LaunchedProcess.start("none", ["/no/such"], log=tmp_path / "deep" / "log", stop_grace_s=0.3)
    assert await asyncio.wait_for(process.wait(), WAIT_S) == 127
    assert "/no/such" in process.log_tail()


async def test_log_tail_holds_the_last_lines_of_this_process_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("of a former process\n")
    process = LaunchedProcess.start("count", ["sh", "-c", "seq 3; seq 4 >&2"], log=log, stop_grace_s=0.3)
    await asyncio.wait_for(process.wait(), WAIT_S)
    assert process.log_tail(2) == "3\n4"
    assert process.log_tail(50).splitlines() == ["1", "2", "3", "1", "2", "3", "4"]
    assert log.read_text().startswith("of a former process")


async def test_a_command_is_asked_before_it_is_killed(tmp_path: Path) -> None:
    command = ["sh", "-c", "trap 'echo asked; exit 5' TERM; echo up; while :; do sleep 0.05; done"]
    process = LaunchedProcess.start("polite", command, log=tmp_path / "log", stop_grace_s=20.0)
    await asyncio.to_thread(_wait_until, lambda: process.log_tail() == "up")
    await process.stop()
    assert process.returncode == 5
    assert process.log_tail() == "up\nasked"


def test_environment_and_working_directory_are_the_given_ones(tmp_path: Path) -> None:
    process = LaunchedProcess.start(
        "env",
        ["/bin/sh", "-c", "echo $WORD; pwd"],
        log=tmp_path / "log",
        env={"WORD": "mill"},
        cwd=tmp_path,
        stop_grace_s=0.3,
    )
    _wait_until(lambda: not process.is_running)
    assert process.log_tail().splitlines() == ["mill", str(tmp_path)]


@pytest.mark.parametrize("first_given", [32_768, 1_024])
def test_a_free_port_can_be_listened_on_and_is_of_those_given_to_nobody_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first_given: int
) -> None:
    (tmp_path / "given").write_text(f"{first_given}\t60999\n")
    monkeypatch.setattr("rollmill.tasks.processes.launched_process._PORTS_GIVEN", tmp_path / "given")
    port = free_port()
    assert port < 32_768 or first_given == 1_024
    with socket.create_server(("127.0.0.1", port)) as server:
        assert server.getsockname()[1] == port
        assert free_port() != port


def test_a_free_port_is_given_to_one_of_two_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "given").write_text("12003\t60999\n")
    monkeypatch.setattr("rollmill.tasks.processes.launched_process._PORTS_GIVEN", tmp_path / "given")
    chosen = {free_port() for _ in range(4)}
    assert len(chosen) == 4
    other = f"""
from pathlib import Path
from rollmill.tasks.processes import launched_process
launched_process._PORTS_GIVEN = Path({str(tmp_path / "given")!r})
print(launched_process.free_port())
"""
    assert int(subprocess.check_output([sys.executable, "-c", other])) not in {
        *chosen,
        12_000,
        12_001,
        12_002,
    }


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
