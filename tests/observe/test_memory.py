"""What a process has, who holds it, and what it gives back."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rollmill.tasks.observe.process_memory import (
    KINDS,
    MIB,
    Holders,
    rss_bytes_below,
    rss_bytes_by_kind,
)

BLOCK_BYTES, N_BLOCKS = 64 * 1024, 2048
"""Blocks below the size from which the C allocator asks the system for each by itself."""

WAITS = "import sys; print('up', flush=True); sys.stdin.read()"


def run_alone(code: str) -> list[int]:
    """The numbers that code prints in a process of few objects, without other threads, whose allocations would count too."""
    script = f"""
import ctypes, gc, sys
from rollmill.tasks.observe.process_memory import Holders, malloc_bytes, own_rss_bytes, release_to_system
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
{code}
"""
    shown = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return list(map(int, shown.stdout.split()))


def test_freed_memory_goes_back_to_the_system() -> None:
    # The last block stays: it keeps the heap's end in use, so that the allocator does not shrink the heap by itself.
    kept, released = run_alone(f"""
blocks = [libc.malloc({BLOCK_BYTES}) for _ in range({N_BLOCKS})]
for block in blocks:
    ctypes.memset(block, 1, {BLOCK_BYTES})
used = own_rss_bytes()
for block in blocks[:-1]:
    libc.free(block)
print(used - own_rss_bytes())
release_to_system()
print(used - own_rss_bytes())
""")
    assert released - kept > 0.8 * N_BLOCKS * BLOCK_BYTES


def test_memory_in_use_and_memory_kept_by_the_allocator_are_separate_figures() -> None:
    in_use, in_use_after, kept = run_alone(f"""
before, _ = malloc_bytes()
blocks = [libc.malloc({BLOCK_BYTES}) for _ in range({N_BLOCKS})]
grown, free = malloc_bytes()
print(grown - before)
for block in blocks[:-1]:
    libc.free(block)
after, more = malloc_bytes()
print(after - before, more - free)
""")
    assert in_use >= N_BLOCKS * BLOCK_BYTES
    assert in_use_after < 0.1 * in_use
    assert kept > 0.8 * in_use


def test_growth_is_attributed_to_the_type_of_the_added_objects() -> None:
    (is_found,) = run_alone("""
class Leaked(list): "What nothing else makes."
before = Holders.now(counts_objects=True)
leaked = [Leaked([number]) for number in range(100_000)]
gc.collect()  # young objects are not counted
text = Holders.now(counts_objects=True).grown_since(before)
print(int("objects by type +100,000 Leaked" in text))
""")
    assert is_found


def test_objects_are_counted_on_request_only() -> None:
    assert not Holders.now().objects
    assert Holders.now(counts_objects=True).objects


def test_holders_add_up_to_the_resident_memory() -> None:
    holders = Holders.now(arrow_bytes=MIB)
    assert sum(holders.held_bytes.values()) == holders.rss_bytes
    assert holders.held_bytes["Arrow"] == MIB


def test_the_largest_growth_is_named_first() -> None:
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
        "+27 MiB c, +5 MiB b, -2 MiB a; objects by type +895 dict, +4 list; queued 30 rows, 2 spans"
    )


def test_no_python_code_runs_while_the_counted_objects_are_held() -> None:
    """Another thread could: one that makes a tuple, which somebody holds before its size is final, fails with SystemError."""
    n_counted, *n_referrers = run_alone("""
class Leaked(list): "What nothing else makes."
held = Leaked([1])
gc.collect()  # young objects are not counted
n_referrers = [len(gc.get_referrers(held))]

def look(frame, event, called):
    # The first events of the module: the later ones are one for each type's name.
    if frame.f_code.co_filename.endswith("process_memory.py") and len(n_referrers) < 50:
        n_referrers.append(len(gc.get_referrers(held)))

sys.setprofile(look)  # called before and after each function, where the interpreter may change threads
counted = Holders.now(counts_objects=True).objects
sys.setprofile(None)
print(counted["Leaked"], *n_referrers)
""")
    assert n_counted >= 1
    assert len(n_referrers) == 50
    assert len(set(n_referrers)) == 1


@pytest.mark.parametrize(("word", "kind"), KINDS.items())
def test_a_process_is_identified_by_its_command_line(word: str, kind: str) -> None:
    with up(WAITS, word) as pid:
        assert rss_bytes_below()[kind, pid] > MIB


def test_a_process_has_the_kind_of_its_parent() -> None:
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WAITS!r}])"
    others = rss_bytes_below().keys()
    with up(outer, "rollmill.tasks.train.service.trainer_process"):
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
