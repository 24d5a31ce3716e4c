"""Reads a run's rollouts over and over, until its standard input is closed: polling_reader.py FOLDER READER.

Every read must give every row that was acknowledged before it, and none twice. Writes a line once it can read, at
its end how often it did.
"""

import selectors
import sys
from collections.abc import Callable
from pathlib import Path

import duckdb
import polars as pl
import pyarrow.dataset

from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_shards, read

Ids = list[str]


def by_polars(files: object) -> Ids:
    rollouts = pl.scan_ipc(files, hive_partitioning=True).unique("trajectory_id")
    return rollouts.select("trajectory_id", "token_ids").collect()["trajectory_id"].to_list()


def by_duckdb(files: object) -> Ids:
    rollouts = pyarrow.dataset.dataset(files, format="ipc", partitioning="hive")
    query = "select trajectory_id, any_value(token_ids) from rollouts group by trajectory_id"
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.register("rollouts", rollouts)
        return [row[0] for row in connection.sql(query).fetchall()]


def by_rollmill(run: Path) -> Ids:
    return list(read(RunFolder(run), "rollouts", ["trajectory_id", "token_ids"])["trajectory_id"].to_pylist())


READERS: dict[str, Callable[[Path], Ids]] = {
    "polars": lambda run: by_polars(run / "rollouts/**/*.arrow"),
    "duckdb": lambda run: by_duckdb(run / "rollouts"),
    "polars by names": lambda run: by_polars(list_shards(str(run), "rollouts")),
    "duckdb by names": lambda run: by_duckdb(list_shards(str(run), "rollouts")),
    "rollmill": by_rollmill,
}


def main(run: Path, read_ids: Callable[[Path], Ids]) -> None:
    n_reads, acknowledged = 0, run.parent / "acknowledged"
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    with selectors.DefaultSelector() as stdin:
        stdin.register(sys.stdin, selectors.EVENT_READ)
        while not stdin.select(timeout=0.01):
            if not acknowledged.exists() or not (before := acknowledged.read_text()):
                continue  # a plain reader takes a data set without a file for an error
            found = read_ids(run)
            n_reads += 1
            twice = len(found) - len(set(found))
            missing = set(before.rpartition("\n")[0].split("\n")) - set(found)
            if twice or missing:
                sys.exit(f"read {n_reads}: {twice} rows are there twice, missing are {sorted(missing)}")
    sys.stdout.write(f"{n_reads}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), READERS[sys.argv[2]])
