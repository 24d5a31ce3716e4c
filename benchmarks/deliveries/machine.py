"""What the machine itself takes, and what of it a process has used."""

import asyncio
import resource
import threading
import time
from pathlib import Path

from rollmill.tasks.observe.loop_lag import LoopLag

TOUCHED_BYTES = 3_000_000_000
PIECE_BYTES = 1 << 24
ROW_BYTES = 9_450_000


def peak_rss_gb() -> float:
    """Most resident memory so far; pages of files that are mapped count."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def kernel_cpu_s() -> float:
    """CPU seconds that this process has spent in the kernel."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_stime


def threads_cpu_s(name_prefix: str) -> float:
    """CPU seconds of this process's threads whose names begin so."""
    ids = [each.native_id for each in threading.enumerate() if each.name.startswith(name_prefix)]
    return sum(
        int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9 for thread in ids
    )


def plain_write_cpu_s(place: Path, n_rows: int) -> float:
    """CPU seconds of writing as many bytes, from one piece of memory to a file."""
    file, row = place / "plain", bytes(ROW_BYTES)
    started = time.process_time()
    with file.open("wb", buffering=0) as sink:
        for _ in range(n_rows):
            sink.write(row)
    spent = time.process_time() - started
    file.unlink()
    return spent


def touch_memory(place: Path) -> None:
    """Have the machine's free memory backed: a virtual machine pays for the first touch of what it gave back."""
    file, piece = place / "touched", bytes(PIECE_BYTES)
    with file.open("wb", buffering=0) as sink:
        for _ in range(TOUCHED_BYTES // len(piece)):
            sink.write(piece)
    file.unlink()


async def measure_idle_lag_ms(seconds: float) -> float:
    """Measure the largest lag in ms of a loop that has no other work."""
    lag = LoopLag()
    with lag.sample():
        await asyncio.sleep(seconds)
    return lag.largest.lag_ms
