"""What does it cost to keep 256 ordinary rows, 27 MB of text and tokens, in 32 commits? Compared with json and msgspec.

The run's writer gets the rows as rollouts finish, one at a time, stores and acknowledges eight in a commit; the others
encode the same rows and write eight to a file, which keeps no types and cannot be scanned by column. The limit writes as many bytes,
which are there already, to as many files. CPU is that of all threads, lag that of the event loop above that of the same loop
without work; medians. Making rows of trajectories, which no figure includes, is `rows_cpu_ms`.
"""

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson

from benchmarks.deliveries.machine import measure_idle_lag_ms
from rollmill.tasks.observe.loop_lag import LoopLag
from rollmill.tasks.rollout.environment import Example, Message
from rollmill.tasks.rollout.trajectory import Trajectory, TrajectoryRequest, Turn, rollout_rows
from rollmill.tasks.store.filesystem import LocalFiles
from rollmill.tasks.store.rows import Rows
from rollmill.tasks.store.shards.writer import RunWriter

N_ROWS, N_COMMITS, REPEATS = 256, 32, 9
N_TOKENS, TEXT = 6_000, "an answer " * 5_000
ROWS_A_COMMIT = N_ROWS // N_COMMITS
TARGETS = {"cpu_to_limit": 4.0, "lag_excess_ms": 5.0}

Keep = Callable[[Path], Awaitable[None]]


def trajectory(sample: int) -> Trajectory:
    random = np.random.default_rng(sample)
    mask = np.arange(N_TOKENS) >= N_TOKENS // 4
    return Trajectory(
        work=TrajectoryRequest(
            f"run.0.{sample}.0", 0, sample, 0, Example("0", {"answer": "85"}), sample, 1.0
        ),
        status="complete",
        messages=(Message("user", "a question " * 20), Message("assistant", TEXT)),
        token_ids=random.integers(0, 150_000, N_TOKENS).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, random.normal(size=N_TOKENS), np.nan).astype(np.float32),
        version_spans=((N_TOKENS // 4, 0),),
        finish_reason="stop",
        turns=(Turn(N_TOKENS // 4, N_TOKENS - N_TOKENS // 4, 1),),
        server="http://127.0.0.1:8000",
        started_at=datetime.now(UTC),
        duration_s=1.0,
        generate_s=1.0,
        environment_s=0.0,
        queue_s=0.0,
    )


def ours(rows: Sequence[Rows]) -> Keep:
    async def keep(folder: Path) -> None:
        (folder / ".tmp").mkdir()
        async with RunWriter(LocalFiles(folder, folder / ".tmp"), 1, 0.0) as writer:
            for first in range(0, N_ROWS, ROWS_A_COMMIT):
                part = rows[first : first + ROWS_A_COMMIT]
                await asyncio.gather(*(writer.append("rollouts", each, step=0) for each in part))
        assert len(LocalFiles(folder, folder / ".tmp").keys("rollouts/*/*.arrow")) == N_COMMITS

    return keep


def make_encoding(rows: Sequence[Any], encode: Callable[[Any], bytes]) -> Keep:
    def write(file: Path, part: Sequence[Any]) -> None:
        file.write_bytes(encode(part))

    async def keep(folder: Path) -> None:
        for first in range(0, N_ROWS, ROWS_A_COMMIT):
            await asyncio.to_thread(write, folder / f"{first}", rows[first : first + ROWS_A_COMMIT])

    return keep


async def measure(keep: Keep) -> tuple[float, float]:
    """(CPU ms of all threads, excess of the largest lag in ms) of one time."""
    with tempfile.TemporaryDirectory() as folder:
        idle_ms = await measure_idle_lag_ms(0.2)
        lag, started = LoopLag(), time.process_time()
        with lag.sample():
            await keep(Path(folder))
        return 1000 * (time.process_time() - started), lag.largest.lag_ms - idle_ms


def main() -> None:
    trajectories = [trajectory(sample) for sample in range(N_ROWS)]
    rows_ms = []
    for _ in range(REPEATS):
        started = time.process_time()
        rows = [rollout_rows("run", 0, "addition", [each]) for each in trajectories]
        rows_ms.append(1000 * (time.process_time() - started))
    rows_cpu_ms = statistics.median(rows_ms)
    plain = [each.to_pylist()[0] for each in rows]
    n_bytes = sum(each.nbytes for each in rows)
    print(f"{n_bytes / 1e6:.1f} MB")
    there = [np.zeros(n_bytes // N_ROWS, np.uint8).tobytes()] * N_ROWS
    ways = {
        "ours": ours(rows),
        "json": make_encoding(plain, lambda part: json.dumps(part, default=str).encode()),
        "msgspec": make_encoding(plain, msgspec.json.encode),
        "orjson": make_encoding(plain, orjson.dumps),
        "limit": make_encoding(there, b"".join),
    }
    found: dict[str, dict[str, float]] = {}
    print(f"{'':10}{'CPU ms':>10}{'lag excess ms':>16}")
    print(f"{'rows made':10}{rows_cpu_ms:10.1f}      (the first time: {rows_ms[0]:.1f})")
    for name, keep in ways.items():
        pairs = [asyncio.run(measure(keep)) for _ in range(REPEATS)]
        cpu_ms, lag_ms = (statistics.median(column) for column in zip(*pairs, strict=True))
        found[name] = {"cpu_ms": cpu_ms, "lag_excess_ms": lag_ms}
        print(f"{name:10}{cpu_ms:10.1f}{lag_ms:16.2f}", flush=True)
    ratio = {"cpu_to_limit": found["ours"]["cpu_ms"] / found["limit"]["cpu_ms"]}
    for name, target in TARGETS.items():
        value = (found["ours"] | ratio)[name]
        print(f"{name}: {value:.1f}, target {target:g}: {'reached' if value <= target else 'MISSED'}")
    print(
        json.dumps(
            {"benchmark": "persist", "rows": N_ROWS, "bytes": n_bytes}
            | {"rows_cpu_ms": rows_cpu_ms, "first_rows_cpu_ms": rows_ms[0]}
            | found["ours"]
            | ratio
            | {"ways": found}
        )
    )


if __name__ == "__main__":
    main()
