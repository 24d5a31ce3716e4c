"""Memory of this process and of those that it started: what it is, who holds it, and giving it back."""

import ctypes
import gc
import sys
import tracemalloc
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import psutil

KINDS = {
    "tasks.train.service": "trainer",
    "vllm.entrypoints": "servers",
    "tasks.rollout.env_worker": "environment",
    "tasks.score.worker": "scoring",
    "tasks.observe.sink_process": "sinks",
}
"""What a started process is, by a word of its command line, or of the command line of a process above it."""

MIB = 2**20

YOUNG_OBJECTS = 20_000
"""Objects that are made and not freed before the garbage collector looks at the young ones. Python's own 700 are 170 looks
in a step of 512 trajectories, some of them at all that is in flight; these are 5, and half of what they see is garbage."""

MOST_LINES = 5


def keep_for_good() -> None:
    """Take all that is in memory now out of the garbage collector's sight, and have it look less often.

    A collection of everything stalls the event loop: for 0.15 s with what Prefect, Polars and pyarrow bring along,
    for a third of that with what a run makes.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def release_to_system() -> None:
    """Give pages that the C allocator keeps for later back to the system; blocking, without the interpreter's lock.

    Nothing happens where the C library is not glibc.
    """
    if trim := getattr(_libc, "malloc_trim", None):
        trim(0)


def own_rss_bytes() -> int:
    """Resident memory of this process, what it shares with others included."""
    resident: int = psutil.Process().memory_info().rss
    return resident


def rss_bytes_by_kind() -> dict[str, int]:
    """Resident memory of the processes below this one, by what they are; what is shared counts for each.

    Example: {"trainer": 900000000, "servers": 2100000000}: of the trainer's the supervisor, torchrun and all ranks.
    """
    found: Counter[str] = Counter()
    kinds: dict[int, str] = {}
    for process in psutil.Process().children(recursive=True):  # each after the one that started it
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            words = " ".join(process.cmdline())
            own = next((kind for word, kind in KINDS.items() if word in words), "")
            kind = kinds[process.pid] = kinds.get(process.ppid()) or own
            found[kind] += process.memory_info().rss
    return {kind: n_bytes for kind, n_bytes in found.items() if kind}


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Holders:
    """Who holds this process's memory.

    Attributes:
        rss_bytes: all of it that is resident.
        malloc_bytes: in use, of the C allocator: Python's larger objects, and libraries'.
        malloc_free_bytes: kept by the C allocator for later.
        python_blocks: Python objects and their parts of up to 512 bytes, which have an allocator of their own.

    Objects are not counted by type: `gc.get_objects` shows those that another thread is still making, and a tuple that
    is seen too early fails with SystemError.
    """

    rss_bytes: int
    malloc_bytes: int
    malloc_free_bytes: int
    python_blocks: int

    @classmethod
    def now(cls) -> "Holders":
        """As it is now."""
        return cls(own_rss_bytes(), *malloc_bytes(), sys.getallocatedblocks())

    def grown_since(self, before: "Holders") -> str:
        """Where what came on top is, in words, the largest first."""
        parts = [
            f"C allocator in use {_mib(self.malloc_bytes - before.malloc_bytes)}",
            f"kept by it for later {_mib(self.malloc_free_bytes - before.malloc_free_bytes)}",
            f"{self.python_blocks - before.python_blocks:+,} small Python blocks",
        ]
        return "; ".join([*parts, *_lines()])


def malloc_bytes() -> tuple[int, int]:
    """Bytes of the C allocator in use, and kept for later; zeros where the C library does not say."""
    if not hasattr(_libc, "mallinfo2"):
        return 0, 0
    _libc.mallinfo2.restype = _Mallinfo2
    info = _libc.mallinfo2()
    return info.uordblks + info.hblkhd, info.fordblks


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:+,.0f} MiB"


def _lines() -> list[str]:
    """The lines of code that hold most, where Python was told to trace (PYTHONTRACEMALLOC=1)."""
    if not tracemalloc.is_tracing():
        return []
    most = tracemalloc.take_snapshot().statistics("lineno")[:MOST_LINES]
    return [f"{each.size / MIB:,.0f} MiB at {each.traceback}" for each in most]
