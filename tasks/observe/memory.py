"""Memory of this process and of those that it started: what it is, who holds it, and giving it back."""

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

MOST_NAMED = 5
OLDEST = 2
"""Generation of the garbage collector in which objects stay."""
MOST_COUNTED = 2_000_000
"""Objects that are counted by type at most."""


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


def rss_bytes_below() -> dict[tuple[str, int], int]:
    """Resident memory of each process below this one of which is known what it is, by that and by its id.

    Example: {("trainer", 41): 60000000, ("trainer", 42): 840000000}: the supervisor, and a rank.
    """
    found: dict[tuple[str, int], int] = {}
    kinds: dict[int, str] = {}
    for process in psutil.Process().children(recursive=True):  # each after the one that started it
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            words = " ".join(process.cmdline())
            own = next((kind for word, kind in KINDS.items() if word in words), "")
            if kind := kinds.setdefault(process.pid, kinds.get(process.ppid()) or own):
                found[kind, process.pid] = process.memory_info().rss
    return found


def rss_bytes_by_kind(below: Mapping[tuple[str, int], int]) -> dict[str, int]:
    """Resident memory of the processes below this one, by what they are; what is shared counts for each.

    Example: {"trainer": 900000000, "servers": 2100000000}: of the trainer's the supervisor, torchrun and all ranks.
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
    """Who holds this process's memory.

    Attributes:
        rss_bytes: all of it that is resident.
        held_bytes: of whom, by name; they add up to it.
        objects: live Python objects that refer to others, by type, but for young ones and what was there before
            `keep_for_good`.
        waiting: what waits to be taken on, by name.
    """

    rss_bytes: int
    held_bytes: Mapping[str, int]
    objects: Mapping[str, int]
    waiting: Mapping[str, int]

    @classmethod
    def now(cls, arrow_bytes: int = 0, waiting: Mapping[str, int] | None = None) -> "Holders":
        """As it is now; holds the interpreter for some 50 ms for each 200,000 objects."""
        rss_bytes, (in_use, kept) = own_rss_bytes(), malloc_bytes()
        held = {
            "in use by the C allocator": in_use,
            "kept by the C allocator for later": kept,
            "Arrow": arrow_bytes,
            "small Python objects and all else": rss_bytes - in_use - kept - arrow_bytes,
        }
        return cls(rss_bytes, held, _objects_by_type(), waiting or {})

    def grown_since(self, before: "Holders") -> str:
        """Where what came on top is, in words, the largest first."""
        grown = {name: n_bytes - before.held_bytes.get(name, 0) for name, n_bytes in self.held_bytes.items()}
        sizes = [f"{n_bytes / MIB:+,.0f} MiB {name}" for name, n_bytes in _largest(grown)]
        more = {name: n - before.objects.get(name, 0) for name, n in self.objects.items()}
        objects = [f"{n:+,} {name}" for name, n in _largest(more)[:MOST_NAMED] if n > 0]
        waiting = [f"{n:,} {name}" for name, n in _largest(self.waiting) if n > 0]
        told = {"": sizes, "objects by type ": objects, "waiting are ": waiting, "lines of code ": _lines()}
        return "; ".join(f"{what}{', '.join(parts)}" for what, parts in told.items() if parts)


def _largest(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(sizes.items(), key=itemgetter(1), reverse=True)


def _objects_by_type() -> Counter[str]:
    """Live objects that the garbage collector has seen twice, by type.

    They are held in one call of C alone, in which no other thread comes to run: one that is just making a tuple fails with
    SystemError when it goes on while somebody holds that. Such a tuple is hardly ever among the old ones besides.
    """
    types = list(map(type, islice(chain.from_iterable(map(gc.get_objects, [OLDEST])), MOST_COUNTED)))
    return Counter(each.__qualname__ for each in types)


def malloc_bytes() -> tuple[int, int]:
    """Bytes of the C allocator in use, and kept for later; zeros where the C library does not say."""
    if not hasattr(_libc, "mallinfo2"):
        return 0, 0
    _libc.mallinfo2.restype = _Mallinfo2
    info = _libc.mallinfo2()
    return info.uordblks + info.hblkhd, info.fordblks


def _lines() -> list[str]:
    """The lines of code that hold most, where Python was told to trace (PYTHONTRACEMALLOC=1)."""
    if not tracemalloc.is_tracing():
        return []
    most = tracemalloc.take_snapshot().statistics("lineno")[:MOST_NAMED]
    return [f"{each.size / MIB:,.0f} MiB at {each.traceback}" for each in most]
