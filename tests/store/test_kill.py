"""A writer that is killed: whatever was acknowledged is there."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import polars as pl

from tasks.store.layout import RunFolder
from tasks.store.reader import read

REPOSITORY = Path(__file__).parents[2]
N_KILLS = 4
GROUPS = 1_000

WRITER = """
import asyncio, os, sys
from pathlib import Path

sys.path.insert(0, "tests/store")
from conftest import make_rows

from tasks.store.config import StoreConfig
from tasks.store.layout import RunFolder
from tasks.store.resume import unfinished
from tasks.store.run import OpenRun

async def work(root, groups):
    folder = RunFolder(Path(root) / "run")
    config_of = StoreConfig(root=root, flush_s=0.0)
    with OpenRun.open(
        folder, config={}, fixed=frozenset(), versions={}, git_commit="", config_of=config_of
    ) as run:
        async with run.writer as writer:
            missing = unfinished(folder, 0, range(groups), 1, "addition@1").to_sample

            async def one(group):
                await writer.append("rollouts", make_rows("rollouts", step=0, group=group, sample=0), step=0)
                os.write(1, f"{group}\\n".encode())

            for first in range(0, len(missing), 7):
                await asyncio.sleep(0)
                for group, _ in missing[first : first + 7]:
                    asyncio.get_running_loop().create_task(one(group))

asyncio.run(work(sys.argv[1], int(sys.argv[2])))
"""


def killed_after(n_acknowledged: int, root: Path) -> list[int]:
    """Run the writer until it has acknowledged that many groups, kill it; returns all it has acknowledged."""
    command = [sys.executable, "-c", WRITER, str(root), str(GROUPS)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(n_acknowledged)]
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged += [int(line) for line in writer.stdout]
    assert writer.returncode == -signal.SIGKILL
    return acknowledged


def test_whatever_was_acknowledged_before_a_kill_is_there_and_nothing_is_there_twice(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    acknowledged: set[int] = set()
    for n in random.Random(7).choices(range(1, 200), k=N_KILLS):
        before = set(read(folder, "rollouts", ["group"])["group"].to_pylist())
        now = killed_after(n, tmp_path)
        assert not before & set(now)
        acknowledged |= set(now)
        stored = read(folder, "rollouts", ["group"])["group"].to_pylist()
        assert acknowledged <= set(stored)
        assert len(stored) == len(set(stored))
        scanned = pl.scan_ipc(f"{folder.root}/rollouts/**/*.arrow", hive_partitioning=True)
        assert scanned.select(pl.len()).collect().item() == len(stored)
    subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path), str(GROUPS)],
        cwd=REPOSITORY,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    assert sorted(read(folder, "rollouts", ["group"])["group"].to_pylist()) == list(range(GROUPS))
