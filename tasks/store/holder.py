"""Who holds a run's lock: a process on a machine."""

import os
import socket
from pathlib import Path
from typing import Self

from pydantic import BaseModel

_PROC = Path("/proc")


class Holder(BaseModel):
    """A process, as a lock names it.

    Attributes:
        machine: the boot of a machine and the numbering of its processes; empty where the system does not say.
        began: when the process began, as the system counts; empty where it does not say.
    """

    pid: int
    host: str
    machine: str = ""
    began: str = ""

    @classmethod
    def this_process(cls) -> Self:
        """The process that asks."""
        pid = os.getpid()
        return cls(pid=pid, host=socket.gethostname(), machine=_machine(), began=_began(pid))

    def is_known_dead(self) -> bool:
        """True when it ran on this machine and runs no more; False also when that cannot be told from here."""
        return bool(self.machine) and self.machine == _machine() and _began(self.pid) != self.began

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _machine() -> str:
    try:
        boot, processes = _PROC / "sys/kernel/random/boot_id", _PROC / "self/ns/pid"
        return f"{boot.read_text().strip()} {processes.readlink()}"
    except OSError:
        return ""


def _began(pid: int) -> str:
    """Clock ticks from the machine's boot to the process's begin; empty when it has ended, or nothing tells."""
    try:
        state, *fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in "ZX" else fields[18]
