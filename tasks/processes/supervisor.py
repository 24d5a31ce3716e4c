"""Runs one command, and ends it with all its descendants when its owner requests that or has ended.

Standard library only, run as a file: `python -I -S supervisor.py OWNER_PID GRACE_S FDS COMMAND...`

Its standard input is the lifeline, a pipe whose other end the owner holds: a byte on it, or its end, asks the
supervisor to stop. The supervisor is the sub-reaper of its descendants: one whose parent dies becomes its child, in whatever
session, so none can leave the tree that it ends.

To end: SIGTERM to the command, then, once that is gone, to what it left behind; SIGKILL to all that still
live after GRACE_S seconds. Its exit status is the command's; 128 + n when signal n ended that; 127 when it
cannot be run.
"""

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

CANNOT_RUN = 127
SIGNALLED = 128
LOOK_AGAIN_S = 0.05
LIFELINE = 0

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


class Supervisor:
    """Runs one command, and ends it with all its descendants when asked to, or when the owner process ends."""

    def __init__(self, owner_pid: int, grace_s: float, pass_fds: Sequence[int]) -> None:
        self._owner_pid, self._grace_s, self._pass_fds = owner_pid, grace_s, pass_fds
        self._is_asked = False
        self._status: int | None = None
        self._selector = selectors.DefaultSelector()

    def run(self, command: Sequence[str]) -> int:
        """Run the command until it ends, or until the owner asks for its end or ends itself; return the exit status."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._watch_signals()
        self._watch_owner()
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                preexec_fn=_die_with_supervisor,
                pass_fds=self._pass_fds,
            )
        except OSError as error:
            sys.stderr.write(f"cannot run {command[0]}: {error.strerror}\n")
            return CANNOT_RUN
        # The other end of a socket sees its end when the command is dead, not only when this process is.
        for descriptor in self._pass_fds:
            os.close(descriptor)
        while self._status is None and not self._is_asked:
            self._wait(None)
            self._reap(child.pid)
        self._end(child.pid)
        return self._status if self._status is not None else SIGNALLED + signal.SIGKILL

    def _watch_signals(self) -> None:
        # A signal that arrives between a check and the next wait would be missed; its byte in the pipe ends the wait.
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._ask)
        # Python writes to the pipe only for signals that have a handler, even one that does nothing.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(reader, selectors.EVENT_READ, lambda: os.read(reader, 4096))

    def _watch_owner(self) -> None:
        self._selector.register(LIFELINE, selectors.EVENT_READ, self._ask)
        # Children that the owner forked without exec hold the lifeline open after it, so its own end is awaited too. An
        # owner that died before this line is no longer the parent, and its process id may be another process's.
        if os.getppid() == self._owner_pid:
            self._selector.register(os.pidfd_open(self._owner_pid), selectors.EVENT_READ, self._ask)
        else:
            self._ask()

    def _ask(self, *_: object) -> None:
        self._is_asked = True

    def _wait(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            key.data()
            if key.data == self._ask:
                self._selector.unregister(key.fd)

    def _reap(self, child_pid: int) -> bool:
        """Read the exit status of each child process that has ended; return True if no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == child_pid:
                code = os.waitstatus_to_exitcode(status)
                self._status = code if code >= 0 else SIGNALLED - code

    def _end(self, child_pid: int) -> None:
        deadline = time.monotonic() + self._grace_s
        if self._status is None:
            _send(signal.SIGTERM, [child_pid])
            while self._status is None and (left_s := deadline - time.monotonic()) > 0:
                self._wait(left_s)
                self._reap(child_pid)
        _send(signal.SIGTERM, descendants(os.getpid()))
        while not self._reap(child_pid):
            left_s = deadline - time.monotonic()
            if left_s > 0:
                self._wait(left_s)
            else:
                # A process may fork between the list and its own SIGKILL, so this is repeated until none is left.
                _send(signal.SIGKILL, descendants(os.getpid()))
                self._wait(LOOK_AGAIN_S)


def descendants(root: int) -> list[int]:
    """Return the process ids of all descendants of the process `root`, its children first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                # The second field is the command's name in brackets, which may contain spaces and brackets.
                after_name = (entry / "stat").read_text(errors="replace").rpartition(")")[2]
            except OSError:
                # It ended while we looked.
                continue
            children.setdefault(int(after_name.split()[1]), []).append(int(entry.name))
    found = list(children.get(root, []))
    for pid in found:
        found += children.get(pid, [])
    return found


def _send(number: signal.Signals, pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            # It ended without a signal from here.
            continue


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _die_with_supervisor() -> None:
    # For a supervisor that is killed by SIGKILL and can end nothing itself.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    _, owner_pid, grace_s, fds, *command = sys.argv
    pass_fds = [int(each) for each in fds.split(",") if each]
    sys.exit(Supervisor(int(owner_pid), float(grace_s), pass_fds).run(command))
