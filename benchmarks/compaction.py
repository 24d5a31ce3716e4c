"""What does a compaction cost the steps that run meanwhile? How long commits take with and without a compaction.

512 ordinary rows of 8,192 tokens (about 50 MB) are stored in 64 shards, which are compacted while rows of the next step are
appended and awaited one after another.
"""

import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.scan import make_rows
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.rows import Rows
from rollmill.tasks.store.schemas import ragged_array
from rollmill.tasks.store.shards.writer import RunWriter

N_ROWS, N_TOKENS, N_COMMITS, N_BESIDE, ANY_SIZE = 512, 8192, 64, 200, 1 << 40


def row(step: int, sample: int) -> Rows:
    random = np.random.default_rng(sample)
    columns = {
        "token_ids": ragged_array([random.integers(0, 150_000, N_TOKENS)], pa.large_list(pa.int32())),
        "logprobs": ragged_array([random.normal(size=N_TOKENS)], pa.large_list(pa.float32())),
        "loss_mask": ragged_array([np.arange(N_TOKENS) >= N_TOKENS // 4], pa.large_list(pa.bool_())),
    }
    return make_rows("rollouts", 1, step, trajectory_id=[f"run.{step}.{sample}"], **columns)


async def time_commits(
    writer: RunWriter, rows: list[Rows], until: "asyncio.Task[str] | None" = None
) -> list[float]:
    """Milliseconds from handing over a row to its acknowledgement, one after another."""
    spent = []
    for each in rows:
        if until is not None and until.done():
            break
        started = time.perf_counter()
        await writer.append("rollouts", each, step=1)
        spent.append(1000 * (time.perf_counter() - started))
    return spent


async def measure(folder: RunFolder) -> dict[str, float]:
    rows, next_rows = ([row(step, sample) for sample in range(N_ROWS)] for step in (0, 1))
    async with RunWriter(open_files(folder), 1, 0.0) as writer:
        for first in range(0, N_ROWS, N_ROWS // N_COMMITS):
            part = rows[first : first + N_ROWS // N_COMMITS]
            await asyncio.gather(*[writer.append("rollouts", each, step=0) for each in part])
        alone = await time_commits(writer, next_rows[:N_BESIDE])
        started, cpu = time.perf_counter(), time.process_time()
        compacting = asyncio.create_task(writer.compact("rollouts/step=000000", ANY_SIZE))
        await asyncio.sleep(0)
        beside = await time_commits(writer, next_rows[N_BESIDE:], compacting)
        await compacting
        figures = {"compaction_s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}
    size = sum(each.nbytes for each in rows)
    return figures | {
        "compacted_mb": size / 1e6,
        "commit_ms": statistics.median(alone),
        "commit_max_ms": max(alone),
        "commit_beside_ms": statistics.median(beside),
        "commit_beside_max_ms": max(beside),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder(Path(root) / "run")
        folder.tmp.mkdir(parents=True)
        figures = asyncio.run(measure(folder))
    for name, value in figures.items():
        print(f"{name:24} {value:8.2f}")
    print(json.dumps({"benchmark": "compaction", "rows": N_ROWS} | figures))


if __name__ == "__main__":
    main()
