"""The processes that a test started, and those that they started, by a variable of their environment.

Run as a file, `python -I -S marked_processes.py MARKER`, it kills them once its standard input ends: with the process of the tests.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def find_marked_processes(marker: str) -> dict[int, str]:
    """Command line of every living process that has the marker in its environment, by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker.encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it ended meanwhile, or is not ours
    return found


@contextmanager
def guard_marked_processes(marker: str) -> Iterator[None]:
    """Have the processes with the marker killed when the block ends, or this process, even by SIGKILL."""
    command = [sys.executable, "-I", "-S", __file__, marker]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        guard.communicate()


def kill_marked_processes(marker: str) -> None:
    """Kill them, and those that they start meanwhile."""
    while found := find_marked_processes(marker):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    sys.stdin.read()
    kill_marked_processes(sys.argv[1])
