"""What does it cost to keep 256 trajectories as they finish? The run's writer beside json and msgspec, in CPU time.

The writer gets one row at a time, as rollouts finish, and stores and acknowledges each; the others encode the
same rows and write them to one file, which keeps no types and cannot be scanned by column.
"""

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from tasks.rollout.environment import Example, Message
from tasks.rollout.trajectory import Trajectory, Work, rollout_rows
from tasks.store.filesystem import LocalFiles
from tasks.store.rows import Rows
from tasks.store.writer import RunWriter

N_ROWS, N_TOKENS, REPEATS = 256, 512, 7


def row(sample: int) -> Rows:
    random = np.random.default_rng(sample)
    mask = np.arange(N_TOKENS) >= N_TOKENS // 4
    messages = (Message("user", "a question " * 20), Message("assistant", "an answer " * 60))
    trajectory = Trajectory(
        work=Work(f"run.0.{sample}.0", 0, sample, 0, Example("0", {"answer": "85"}), sample, 1.0),
        status="complete",
        messages=messages,
        token_ids=random.integers(0, 150_000, N_TOKENS).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, random.normal(size=N_TOKENS), np.nan).astype(np.float32),
        version_spans=((N_TOKENS // 4, 0),),
        finish_reason="stop",
        turns=1,
        server="http://127.0.0.1:8000",
        started_at=datetime.now(UTC),
        duration_s=1.0,
        generate_s=1.0,
        environment_s=0.0,
        queue_s=0.0,
    )
    return rollout_rows("run", 0, "addition", [trajectory])


async def store(rows: list[Rows], folder: Path, flush_s: float) -> None:
    files = LocalFiles(folder, folder / ".tmp")
    (folder / ".tmp").mkdir()
    async with RunWriter(files, 1, flush_s) as writer:
        acknowledgements = []
        for each in rows:
            acknowledgements.append(writer.append("rollouts", each, step=0))
            await asyncio.sleep(0)
        await asyncio.gather(*acknowledgements)


def cpu_ms(work: Callable[[Path], object]) -> float:
    """Median CPU milliseconds of all threads."""
    spent = []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            started = time.process_time()
            work(Path(folder))
            spent.append(1000 * (time.process_time() - started))
    return statistics.median(spent)


def main() -> None:
    rows = [row(sample) for sample in range(N_ROWS)]
    plain = [each.to_pylist()[0] for each in rows]
    figures = {
        "writer_cpu_ms": cpu_ms(lambda folder: asyncio.run(store(rows, folder, 0.02))),
        "writer_unbuffered_cpu_ms": cpu_ms(lambda folder: asyncio.run(store(rows, folder, 0.0))),
        "json_cpu_ms": cpu_ms(
            lambda folder: (folder / "rows.jsonl").write_text(
                "\n".join(json.dumps(each, default=str) for each in plain)
            )
        ),
        "msgspec_cpu_ms": cpu_ms(
            lambda folder: (folder / "rows.json").write_bytes(msgspec.json.encode(plain))
        ),
    }
    for name, value in figures.items():
        print(f"{name:28} {value:8.1f}   {value / figures['json_cpu_ms']:.2f} x json")
    print(json.dumps({"benchmark": "store", "rows": N_ROWS, "tokens": N_TOKENS} | figures))


if __name__ == "__main__":
    main()
