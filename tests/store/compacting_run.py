"""A run without services: rows through the real writer, compacted beside it, gone on with from where its folder stands.

python compacting_run.py FOLDER STEPS ROWS GRACE_S REMOVE_SUPERSEDED: a shard a row, a checkpoint a step. Each id is
written to FOLDER/../acknowledged once its row is stored. Says when the steps are done, and ends when its standard input
is closed.
"""

import asyncio
import os
import sys
from pathlib import Path

from conftest import make_rows

from tasks.store.compactor import Compactor
from tasks.store.config import StoreConfig
from tasks.store.filesystem import files_of
from tasks.store.layout import RunFolder
from tasks.store.reader import read
from tasks.store.run import OpenRun


async def work(folder: RunFolder, steps: int, rows: int, settings: dict[str, object]) -> None:
    acknowledged = os.open(folder.local.parent / "acknowledged", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    config = StoreConfig.model_validate({"root": str(folder.local.parent), "flush_s": 0.0} | settings)
    with OpenRun.open(folder, config={}, fixed={}, versions={}, git_commit="", config_of=config) as run:
        async with run.writer as writer, Compactor(files_of(folder), writer, config, sys.exit) as compactor:
            stored = set(read(folder, "rollouts", ["trajectory_id"])["trajectory_id"].to_pylist())
            for step in range(steps):
                for each in (f"{step}.{n}" for n in range(rows)):
                    if each not in stored:
                        row = make_rows("rollouts", step=step, trajectory_id=each)
                        await writer.append("rollouts", row, step=step)
                        os.write(acknowledged, f"{each}\n".encode())
                compactor.begin(step + 1)
            sys.stdout.write("done\n")
            sys.stdout.flush()
            await asyncio.to_thread(sys.stdin.read)
            await compactor.finish()


if __name__ == "__main__":
    given = {"compaction_grace_s": float(sys.argv[4]), "remove_superseded": sys.argv[5]}
    asyncio.run(work(RunFolder(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]), given))
