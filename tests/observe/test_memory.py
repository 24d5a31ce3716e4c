"""What a process has, who holds it, and what it gives back."""

import ctypes
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tasks.observe.memory import (
    KINDS,
    MIB,
    Holders,
    malloc_bytes,
    own_rss_bytes,
    release_to_system,
    rss_bytes_below,
    rss_bytes_by_kind,
)

BLOCK_BYTES, N_BLOCKS = 64 * 1024, 2048
"""Blocks below the size from which the C allocator asks the system for each by itself."""

WAITS = "import sys; print('up', flush=True); sys.stdin.read()"
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]


def test_freed_memory_goes_back_to_the_system() -> None:
    blocks = [libc.malloc(BLOCK_BYTES) for _ in range(N_BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    used = own_rss_bytes()
    for block in blocks[:-1]:  # the last one keeps the heap's end in use
        libc.free(block)
    release_to_system()
    assert used - own_rss_bytes() > 0.8 * N_BLOCKS * BLOCK_BYTES
    libc.free(blocks[-1])


def test_what_is_in_use_and_what_is_kept_are_told_apart() -> None:
    used, _ = malloc_bytes()
    block = libc.malloc(BLOCK_BYTES)
    grown, _ = malloc_bytes()
    libc.free(block)
    assert BLOCK_BYTES <= grown - used < 2 * BLOCK_BYTES


class Leaked(list[int]):
    """What nothing else makes."""


def test_growth_is_laid_to_the_type_of_the_objects_that_came_on_top() -> None:
    before = Holders.now()
    leaked = [Leaked([number]) for number in range(100_000)]
    gc.collect()  # young objects are not counted
    text = Holders.now().grown_since(before)
    assert f"objects by type +{len(leaked):,} Leaked" in text


def test_holders_add_up_to_the_resident_memory() -> None:
    holders = Holders.now(arrow_bytes=MIB)
    assert sum(holders.held_bytes.values()) == holders.rss_bytes
    assert holders.held_bytes["Arrow"] == MIB


def test_who_came_on_top_most_is_named_first() -> None:
    before = Holders(
        10 * MIB, {"a": 4 * MIB, "b": 3 * MIB, "c": 3 * MIB}, {"list": 5, "dict": 5}, {"spans": 9}
    )
    now = Holders(
        40 * MIB,
        {"a": 2 * MIB, "b": 8 * MIB, "c": 30 * MIB},
        {"list": 9, "dict": 900},
        {"spans": 2, "rows": 30, "points": 0},
    )
    assert now.grown_since(before) == (
        "+27 MiB c, +5 MiB b, -2 MiB a; objects by type +895 dict, +4 list; waiting are 30 rows, 2 spans"
    )


def test_objects_are_counted_while_other_threads_make_tuples() -> None:
    """A tuple that somebody holds while its size is not final fails with SystemError in who makes it."""
    over, failed, interval = threading.Event(), list[SystemError](), sys.getswitchinterval()

    def make() -> None:
        while not over.is_set():
            try:
                tuple(number for number in range(200))
            except SystemError as error:
                failed.append(error)

    threads = [threading.Thread(target=make) for _ in range(2)]
    sys.setswitchinterval(1e-5)
    try:
        for each in threads:
            each.start()
        for _ in range(30):
            Holders.now()
    finally:
        over.set()
        sys.setswitchinterval(interval)
    for each in threads:
        each.join()
    assert not failed


@pytest.mark.parametrize(("word", "kind"), KINDS.items())
def test_a_process_is_known_by_its_command_line(word: str, kind: str) -> None:
    with up(WAITS, word) as pid:
        assert rss_bytes_below()[kind, pid] > MIB


def test_a_process_is_what_the_one_above_it_is() -> None:
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WAITS!r}])"
    others = rss_bytes_below().keys()
    with up(outer, "tasks.train.service"):
        below = {process: n for process, n in rss_bytes_below().items() if process not in others}
    assert [kind for kind, _ in below] == ["trainer", "trainer"]
    assert rss_bytes_by_kind(below) == {"trainer": sum(below.values())}


@contextmanager
def up(code: str, word: str) -> Iterator[int]:
    """The id of a process with a word in its command line, from when it has said something until its input ends."""
    command = [sys.executable, "-c", code, word]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.communicate()
