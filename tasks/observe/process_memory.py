"""Memory of this process and its children: measure it, say who holds it, release it to the system."""

import atexit
import ctypes
import gc
import tracemalloc
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter

import psutil

# Kind of a child process, by a word in its command line or in that of an ancestor: a rank of the trainer is started by its launcher,
# and a vLLM engine by its server.
KINDS = {
    "rollmill.tasks.train.service.trainer_process": "trainer",
    "vllm.entrypoints": "servers",
    "rollmill.tasks.rollout.environment_worker": "environment",
    "rollmill.tasks.score.score_worker": "scoring",
    "rollmill.tasks.observe.sinks.sink_process": "sinks",
}

MIB = 2**20

# Allocations before the garbage collector examines the youngest generation. Python's default of 700 causes 170 collections in a
# step of 512 trajectories, some of them over everything in flight. 20,000 causes 5, and half of what those see is garbage.
YOUNG_OBJECTS = 20_000

MOST_NAMED = 5
OLDEST_GENERATION = 2
# Counting takes about 50 ms for each 200,000 objects, in which the event loop is blocked.
MOST_COUNTED = 2_000_000


def keep_for_good() -> None:
    """Exempt all current objects from garbage collection, and collect less often."""
    # A full collection blocks the event loop: for 0.15 s with the objects of Prefect, Polars and pyarrow, and for a third
    # of that with those of a run.
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    # Objects that stay exempt at the end of the process are leaks to nanobind, which DuckDB is written with, and it prints them.
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)


def release_to_system() -> None:
    """Return free pages of the C allocator to the system; blocks, but releases the GIL. Does nothing without glibc."""
    if trim := getattr(_libc, "malloc_trim", None):
        trim(0)


def own_rss_bytes() -> int:
    """Return the resident memory of this process in bytes, shared pages included."""
    resident: int = psutil.Process().memory_info().rss
    return resident


def rss_bytes_below() -> dict[tuple[str, int], int]:
    """Return the resident memory in bytes of each descendant process of a known kind, by (kind, process id).

    Example: {("trainer", 41): 60000000, ("trainer", 42): 840000000} for the supervisor and a rank.
    """
    found: dict[tuple[str, int], int] = {}
    kinds: dict[int, str] = {}
    # psutil lists parents before their children. A process may end at any time.
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            words = " ".join(process.cmdline())
            own = next((kind for word, kind in KINDS.items() if word in words), "")
            if kind := kinds.setdefault(process.pid, kinds.get(process.ppid()) or own):
                found[kind, process.pid] = process.memory_info().rss
    return found


def rss_bytes_by_kind(below: Mapping[tuple[str, int], int]) -> dict[str, int]:
    """Sum the resident memory of descendant processes by kind; shared pages count once for each process.

    Example: {"trainer": 900000000, "servers": 2100000000}; "trainer" covers supervisor, launcher and all ranks.
    """
    found: Counter[str] = Counter()
    for (kind, _), n_bytes in below.items():
        found[kind] += n_bytes
    return dict(found)


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
    """How much of this process's memory is held by the C allocator, Arrow and everything else.

    Attributes:
        rss_bytes: resident memory.
        held_bytes: bytes by what holds them; they sum to `rss_bytes`.
        objects: number of live container objects by type, without young ones and those from before `keep_for_good`; empty if
            they were not counted.
        waiting: length of each queue, by name.
    """

    rss_bytes: int
    held_bytes: Mapping[str, int]
    objects: Mapping[str, int]
    waiting: Mapping[str, int]

    @classmethod
    def now(
        cls, arrow_bytes: int = 0, waiting: Mapping[str, int] | None = None, *, counts_objects: bool = False
    ) -> "Holders":
        """Measure this process's memory; counting objects holds the GIL for about 50 ms for each 200,000 objects."""
        rss_bytes, (in_use, kept) = own_rss_bytes(), malloc_bytes()
        held = {
            "in use by the C allocator": in_use,
            "kept by the C allocator for later": kept,
            "Arrow": arrow_bytes,
            "small Python objects and all else": rss_bytes - in_use - kept - arrow_bytes,
        }
        return cls(rss_bytes, held, _objects_by_type() if counts_objects else {}, waiting or {})

    def grown_since(self, before: "Holders") -> str:
        """Describe in one line how memory and objects have grown since an earlier measurement, largest growth first."""
        grown = {name: n_bytes - before.held_bytes.get(name, 0) for name, n_bytes in self.held_bytes.items()}
        sizes = [f"{n_bytes / MIB:+,.0f} MiB {name}" for name, n_bytes in _largest(grown)]
        more = {name: n - before.objects.get(name, 0) for name, n in self.objects.items()}
        objects = [f"{n:+,} {name}" for name, n in _largest(more)[:MOST_NAMED] if n > 0]
        waiting = [f"{n:,} {name}" for name, n in _largest(self.waiting) if n > 0]
        lines = []
        # Python traces allocations only if it is started with PYTHONTRACEMALLOC=1, which makes it slow.
        if tracemalloc.is_tracing():
            most = tracemalloc.take_snapshot().statistics("lineno")[:MOST_NAMED]
            lines = [f"{each.size / MIB:,.0f} MiB at {each.traceback}" for each in most]
        parts = {"": sizes, "objects by type ": objects, "queued ": waiting, "lines of code ": lines}
        return "; ".join(f"{label}{', '.join(texts)}" for label, texts in parts.items() if texts)


def _largest(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(sizes.items(), key=itemgetter(1), reverse=True)


def _objects_by_type() -> Counter[str]:
    """Count the live objects of the oldest generation by type."""
    # The objects are referenced only inside one C call, during which no other thread runs: a thread that is building a
    # tuple fails with SystemError if someone else holds a reference to it.
    types = list(
        map(type, islice(chain.from_iterable(map(gc.get_objects, [OLDEST_GENERATION])), MOST_COUNTED))
    )
    return Counter(each.__qualname__ for each in types)


def malloc_bytes() -> tuple[int, int]:
    """Return the C allocator's bytes in use and bytes free; zeros without glibc."""
    if not hasattr(_libc, "mallinfo2"):
        return 0, 0
    _libc.mallinfo2.restype = _Mallinfo2
    info = _libc.mallinfo2()
    return info.uordblks + info.hblkhd, info.fordblks
