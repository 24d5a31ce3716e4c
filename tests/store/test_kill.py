"""A writer that is killed: whatever was acknowledged is there."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read

REPOSITORY = Path(__file__).parents[2]
N_KILLS = 4
GROUPS, AFTER = 400, 30
"""Groups of the run, and those that a writer may store beyond what was waited for."""

WRITER = """
import asyncio, itertools, os, signal, sys
from pathlib import Path

sys.path.insert(0, "tests/store")
from conftest import make_rows

from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.run.step_plan import StoredStep, plan_step

CHAINS = 7

async def work(root, groups, dies_at, most):
    acknowledged = itertools.count(1)
    folder = RunFolder(Path(root) / "run")
    config_of = StoreConfig(root=root)
    with OpenRun.open(
        folder, config={}, fixed={}, versions={}, git_commit="", config_of=config_of
    ) as run:
        async with run.writer as writer:
            missing = plan_step(range(groups), 1, StoredStep.read(folder, 0, "addition@1")).to_sample
            rows = [(group, make_rows("rollouts", step=0, group=group, sample=0)) for group, *_ in missing][:most]

            async def one_after_another(first):
                for group, row in rows[first::CHAINS]:
                    await writer.append("rollouts", row, step=0)
                    os.write(1, f"{group}\\n".encode())
                    if next(acknowledged) == dies_at:
                        os.kill(os.getpid(), signal.SIGKILL)

            await asyncio.gather(*(one_after_another(first) for first in range(CHAINS)))
            if most < groups:
                await asyncio.Event().wait()

asyncio.run(work(sys.argv[1], *map(int, sys.argv[2:])))
"""


def command(root: Path, dies_at: int = 0, most: int = GROUPS) -> list[str]:
    """A writer that kills itself the moment `dies_at` groups are acknowledged, or waits when it has stored `most`."""
    return [sys.executable, "-c", WRITER, str(root), *map(str, (GROUPS, dies_at, most))]


def kill_after(n_acknowledged: int, root: Path, *, by_itself: bool) -> list[int]:
    """Run a writer until that many groups are acknowledged, or a little longer; returns all that were."""
    how = {"dies_at": n_acknowledged} if by_itself else {"most": n_acknowledged + AFTER}
    with subprocess.Popen(command(root, **how), cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(n_acknowledged)]
        if not by_itself:
            os.kill(writer.pid, signal.SIGKILL)
        acknowledged += [int(line) for line in writer.stdout]
    assert writer.returncode == -signal.SIGKILL
    return acknowledged


@pytest.mark.slow
def test_rows_acknowledged_before_a_kill_are_stored_exactly_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    acknowledged: set[int] = set()
    for number, n in enumerate(random.Random(7).choices(range(1, 80), k=N_KILLS)):
        before = set(read(folder, "rollouts", ["group"])["group"].to_pylist())
        now = kill_after(n, tmp_path, by_itself=number % 2 == 0)
        assert not before & set(now)
        acknowledged |= set(now)
        stored = read(folder, "rollouts", ["group"])["group"].to_pylist()
        assert acknowledged <= set(stored)
        assert len(stored) == len(set(stored))
        scanned = pl.scan_ipc(f"{folder.local}/rollouts/**/*.arrow", hive_partitioning=True)
        assert scanned.select(pl.len()).collect().item() == len(stored)
    subprocess.run(command(tmp_path), cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    assert sorted(read(folder, "rollouts", ["group"])["group"].to_pylist()) == list(range(GROUPS))
