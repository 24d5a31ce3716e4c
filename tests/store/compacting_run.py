"""A run without services: rows through the real writer, compacted meanwhile, resumed from what its folder has.

python compacting_run.py FOLDER STEPS ROWS GRACE_S REMOVE_SUPERSEDED: a shard a row, a checkpoint a step. Each id is
written to FOLDER/../acknowledged once its row is stored. Says when the steps are done, and ends when its standard input
is closed.
"""

import asyncio
import os
import sys
from pathlib import Path

from conftest import make_rows

from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.shards.compactor import Compactor


async def work(folder: RunFolder, steps: int, rows: int, settings: dict[str, object]) -> None:
    acknowledged = os.open(folder.local.parent / "acknowledged", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    config = StoreConfig.model_validate({"root": str(folder.local.parent)} | settings)
    with OpenRun.open(folder, config={}, fixed={}, versions={}, git_commit="", config_of=config) as run:
        async with run.writer as writer, Compactor(open_files(folder), writer, config, sys.exit) as compactor:
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
    given = {"compaction_grace_s": float(sys.argv[4]), "compact": sys.argv[5]}
    asyncio.run(work(RunFolder(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]), given))
