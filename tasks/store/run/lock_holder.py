"""The process that holds a run's lock, as the lock records it."""

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Self

from pydantic import BaseModel

from rollmill.tasks.processes.machine import machine_id

_PROC = Path("/proc")


class LockHolder(BaseModel):
    """Identity of a process, as a run's lock records it: pid, host, machine and start.

    Attributes:
        machine: boot id and process namespace of the process's machine; empty if unknown.
        began: start of the process in clock ticks since the boot; empty if unknown.
    """

    pid: int
    host: str
    machine: str = ""
    began: str = ""

    @classmethod
    def this_process(cls) -> Self:
        """Return the identity of the calling process."""
        pid, machine = os.getpid(), ""
        # Without /proc other processes cannot detect that this one has ended: they wait until its lease expires.
        with suppress(OSError):
            machine = machine_id()
        return cls(pid=pid, host=socket.gethostname(), machine=machine, began=_process_start(pid))

    def is_known_dead(self) -> bool:
        """Return True if the process ran on this machine and has ended; False also if that cannot be known from here."""
        here = self.this_process().machine
        # A pid is given again after some time; pid and start together are one process.
        return bool(here) and self.machine == here and _process_start(self.pid) != self.began

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _process_start(pid: int) -> str:
    """Return when a process started, in clock ticks since the boot; empty if it has ended or is unknown."""
    try:
        # The name, in parentheses, may have blanks and parentheses: the fields after it begin at the last one.
        state, *fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in "ZX" else fields[18]
