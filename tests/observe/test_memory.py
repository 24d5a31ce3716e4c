"""What a process has, who holds it, and what it gives back."""

import ctypes
import subprocess
import sys
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


def test_growth_is_laid_to_the_allocator_that_grew() -> None:
    before = Holders.now()
    leaked = [[number] for number in range(10_000)]
    now = Holders.now()
    assert now.python_blocks - before.python_blocks >= len(leaked)
    assert f"{now.python_blocks - before.python_blocks:+,} small Python blocks" in now.grown_since(before)


@pytest.mark.parametrize(("word", "kind"), KINDS.items())
def test_a_process_is_known_by_its_command_line(word: str, kind: str) -> None:
    before = rss_bytes_by_kind().get(kind, 0)
    with up(WAITS, word):
        assert rss_bytes_by_kind()[kind] - before > MIB


def test_a_process_is_what_the_one_above_it_is() -> None:
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WAITS!r}])"
    with up(outer, "tasks.train.service"):
        both = rss_bytes_by_kind()["trainer"]
    with up(WAITS, "tasks.train.service"):
        assert both > 1.5 * rss_bytes_by_kind()["trainer"]


@contextmanager
def up(code: str, word: str) -> Iterator[None]:
    """A process with a word in its command line, from when it has said something until its input ends."""
    command = [sys.executable, "-c", code, word]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.communicate()
