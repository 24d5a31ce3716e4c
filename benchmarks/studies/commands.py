"""Commands of `rollmill` that a study runs as users do: each once, with what it costs."""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import polars as pl

from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import scan
from tests.stubs.prefect_server import prefect_server

ROOT = Path(__file__).parents[2]
Means: TypeAlias = dict[int, float]
"""Means by policy version."""


class Commands:
    """Runs commands in a folder and keeps there which ones are done; a study that was interrupted repeats none of them.

    Attributes:
        folder: working folder of the commands, with their runs and models.
        cpu_s: CPU seconds of each command by its name in the study, with all processes that it started and waited for.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._done = folder, folder / "cpu_s.json"
        vllm = folder / ".venv-vllm"
        if not vllm.is_symlink():
            vllm.symlink_to(ROOT / ".venv-vllm")
        self.cpu_s: dict[str, float] = json.loads(self._done.read_text()) if self._done.exists() else {}

    def run(self, name: str, *arguments: str) -> str:
        """Run `rollmill` with these arguments, unless that is done; returns what it printed, which NAME.log keeps.

        Raises:
            SystemExit: the command failed.
        """
        log = self.folder / f"{name}.log"
        if name not in self.cpu_s:
            command = [str(Path(sys.executable).with_name("rollmill")), *arguments]
            before = _children_cpu_s()
            with log.open("w") as output:
                status = subprocess.run(command, cwd=self.folder, stdout=output, stderr=output).returncode
            if status:
                raise SystemExit(f"{' '.join(command)} failed: see {log}")
            self.cpu_s[name] = round(_children_cpu_s() - before, 2)
            self._done.write_text(json.dumps(self.cpu_s))
            print(f"{name}: {self.cpu_s[name]} CPU s", flush=True)
        return log.read_text()

    def scan(self, run: str, data_set: str, columns: list[str]) -> pl.LazyFrame:
        """Return the rows of a run's data set."""
        return scan(RunFolder(str(self.folder / "runs" / run)), data_set, columns)

    def held_out(self, run: str) -> dict[str, Means]:
        """Return the mean held-out reward of each evaluated version, of sampled and of greedy answers."""
        return mean_by_version(self.scan(run, "evaluations", ["step", "greedy", "reward"]))


def mean_by_version(rewards: pl.LazyFrame) -> dict[str, Means]:
    """Return the mean of the column `reward` for each policy version, for sampled and for greedy answers."""
    rows = rewards.group_by("greedy", "step").agg(pl.col("reward").mean()).sort("step").collect()
    return {
        kind: dict(rows.filter(pl.col("greedy") == greedy).select("step", "reward").iter_rows())
        for kind, greedy in (("sampled", False), ("greedy", True))
    }


@contextmanager
def commands_of(parser: argparse.ArgumentParser) -> Iterator[tuple[Commands, argparse.Namespace]]:
    """Yield commands in the folder of --folder, or in a temporary one, with a Prefect server for them, and the arguments."""
    parser.add_argument("--folder", type=Path, help="folder that keeps the runs; a temporary one by default")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, prefect_server(Path(scratch) / "prefect"):
        folder = words.folder or Path(scratch) / "study"
        folder.mkdir(parents=True, exist_ok=True)
        yield Commands(folder), words


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
