"""How long does it take to look at a long run? `rollmill inspect`, one column and five queries, of 1,000 steps x 512 made-up rows.

The run is stored on this disk, and on an S3 server in a separate process (moto's, which answers one request at a time).
Each step's partition has one shard, as after its compaction. `inspect` is the whole command, from its start to its
end; the column is read and summed in this process. Each of the questions of docs/how-to/queries.md is asked by fresh processes,
which have opened the run; `--questions` asks them alone.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from benchmarks.suite.s3_server import s3_server
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import Files, open_files
from rollmill.tasks.store.folders import RunFolder, partition_folder
from rollmill.tasks.store.reader import scan
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.schemas import dataset_schema, make_batch, ragged_array
from rollmill.tasks.store.shards.shard import write_shard
from rollmill.tasks.store.shards.shard_names import ShardName

GROUPS, GROUP_SIZE, N_TOKENS, REPEATS = 64, 8, 64, 3
EVALUATE_EVERY, N_PROMPTS, N_METRICS = 100, 64, 60
N_PROBLEMS = 5_000
N_PROCESSES = 7
"""Fresh processes that ask each question."""
SCORER = "addition@1"
ASK = """
import json, sys, time
import duckdb
import rollmill

run = rollmill.open_run(sys.argv[1])
started, used = time.perf_counter(), time.process_time()
run.sql(sys.argv[2])
print(json.dumps([time.perf_counter() - started, time.process_time() - used]))
"""


def make_rows(dataset: str, n: int, step: int, **columns: object) -> pa.RecordBatch:
    """Rows with a plain value in every column but those given."""
    plain = {field.name: columns.get(field.name, _plain(field.type, n)) for field in dataset_schema(dataset)}
    return make_batch(dataset, plain | ({"step": np.full(n, step, np.int32)} if "step" in plain else {}))


def _plain(kind: pa.DataType, n: int) -> object:
    if pa.types.is_large_list(kind):
        tokens = np.random.default_rng(n).integers(0, 2, N_TOKENS * n).reshape(n, N_TOKENS)
        return ragged_array(list(tokens.astype(np.int32)), pa.large_list(pa.int32())).cast(kind)
    if pa.types.is_timestamp(kind):
        return [datetime.now(UTC)] * n
    if pa.types.is_large_string(kind):
        return ["what was said " * 20] * n
    return pa.repeat(pa.scalar(1).cast(kind), n)


def rows_of_step(step: int) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Partition and rows of everything that a run stores of a step."""
    n = GROUPS * GROUP_SIZE
    groups = step * GROUPS + np.arange(n) // GROUP_SIZE
    samples = np.arange(n) % GROUP_SIZE
    pairs = zip(groups.tolist(), samples.tolist(), strict=True)
    ids = {
        "trajectory_id": [f"6b873bfb6c92961a.{group}.{sample}.0" for group, sample in pairs],
        "group": groups,
    }
    where = {"step": step}
    status = ["truncated" if i % 16 == 0 else "complete" for i in range(n)]
    prompts = [f"problem {7919 * group % N_PROBLEMS}" for group in groups.tolist()]
    rollouts = {"status": status, "sample": samples.astype(np.int32), "example_id": prompts}
    yield partition_folder("rollouts", where), make_rows("rollouts", n, step, **ids, **rollouts)
    is_right = np.random.default_rng(step).random(n) < 0.5
    scores = make_rows("scores", n, step, **ids, status=["scored"] * n, reward=is_right.astype(float))
    yield partition_folder("scores", {"scorer": SCORER, **where}), scores
    rewards = np.random.default_rng(step).random(GROUPS)
    by_group = {"group": np.unique(groups), "reward_mean": rewards, "reason": [""] * GROUPS}
    yield partition_folder("groups", where), make_rows("groups", GROUPS, step, **by_group)
    own = {"source": [""] * n, "source_step": [step] * n}
    yield partition_folder("plans", where), make_rows("plans", 1, step, problems=[[]])
    yield partition_folder("batches", where), make_rows("batches", n, step, **ids, **own)
    names = ["train/updated", "time/step_s", "drops/trajectories"]
    names += [f"stage/metric_{i}" for i in range(N_METRICS - len(names))]
    yield (
        partition_folder("metrics", where),
        make_rows("metrics", N_METRICS, step, name=names, env=["all"] * N_METRICS),
    )
    if step % EVALUATE_EVERY == 0:
        held_out = {
            "policy_version": np.full(2 * N_PROMPTS, step),
            "greedy": [True, False] * N_PROMPTS,
            "trajectory_id": [f"run.v{step}.{i}" for i in range(2 * N_PROMPTS)],
        }
        yield (
            partition_folder("evaluations", {"version": step}),
            make_rows("evaluations", 2 * N_PROMPTS, step, **held_out),
        )


def store_step(files: Files, step: int) -> None:
    for number, (folder, rows) in enumerate(rows_of_step(step)):
        name = ShardName(1, 10 * step + number, is_compacted=True)
        write = partial(write_shard, name=name, dataset=folder.partition("/")[0], appended=[rows])
        files.publish(folder, write)


def make_run(folder: RunFolder, steps: int) -> None:
    config_of = StoreConfig(root=folder.location.rpartition("/")[0])
    config = {"steps": steps, "evaluate": {"n_prompts": N_PROMPTS}, "score": {"scorer": "addition"}}
    with (
        OpenRun.open(folder, config=config, fixed={}, versions={}, git_commit="", config_of=config_of),
        ThreadPoolExecutor(4) as threads,
    ):
        list(threads.map(partial(store_step, open_files(folder)), range(steps)))


def copy_run(source: RunFolder, target: RunFolder) -> None:
    """Copy every file of a run to the location of another."""
    files = open_files(target)

    def copy(path: Path) -> None:
        def write(unfinished: Path) -> str:
            unfinished.write_bytes(path.read_bytes())
            return path.name

        folder = path.parent.relative_to(source.local).as_posix()
        files.publish("" if folder == "." else folder, write)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(copy, [*source.local.rglob("*.arrow"), source.local / "run.json"]))


def seconds(work: Callable[[], object]) -> float:
    """Median wall time."""
    spent = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        spent.append(time.perf_counter() - started)
    return statistics.median(spent)


def inspect(folder: RunFolder, steps: int) -> None:
    command = [str(Path(sys.executable).parent / "rollmill"), "inspect", folder.location, "--json"]
    shown = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert shown["trajectories"] == steps * GROUPS * GROUP_SIZE
    assert shown["steps"] == steps


def one_column(folder: RunFolder, steps: int) -> None:
    tokens = scan(folder, "rollouts", ["n_completion_tokens"]).select(pl.all().sum()).collect().item()
    assert tokens == steps * GROUPS * GROUP_SIZE


def read_questions() -> list[str]:
    """Return the five questions in SQL of docs/how-to/queries.md."""
    page = (Path(__file__).parents[1] / "docs" / "how-to" / "queries.md").read_text()
    section = page.partition("## Five questions")[2].partition("\n## ")[0]
    questions = re.findall(r"^```sql\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert len(questions) == 5
    return questions


def ask(folder: RunFolder, question: str) -> tuple[float, float]:
    """Return the least wall and the least CPU seconds of a question, in N_PROCESSES processes that have opened the run."""
    command = [sys.executable, "-c", ASK, folder.location, question]
    spent = [
        json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        for _ in range(N_PROCESSES)
    ]
    return min(wall for wall, _ in spent), min(cpu for _, cpu in spent)


def measure_questions(folder: RunFolder) -> dict[str, float]:
    """Return the figures of the five questions, and the slowest."""
    asked = [ask(folder, each) for each in read_questions()]
    figures = {"slowest_query_s": max(wall for wall, _ in asked)}
    for number, (wall, cpu) in enumerate(asked, 1):
        figures |= {f"query_{number}_s": wall, f"query_{number}_cpu_s": cpu}
    return figures


def measure(folder: RunFolder, steps: int) -> tuple[float, float]:
    """Seconds of `inspect`, and of the column."""
    return seconds(lambda: inspect(folder, steps)), seconds(lambda: one_column(folder, steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--local-only", action="store_true")
    parser.add_argument("--questions", action="store_true", help="ask the five questions alone")
    given = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as root:
        local = RunFolder(f"{root}/run")
        make_run(local, given.steps)
        figures |= measure_questions(local)
        if not given.questions:
            figures["inspect_s"], figures["column_s"] = measure(local, given.steps)
        if not given.questions and not given.local_only:
            os.environ["ROLLMILL_SCRATCH"] = f"{root}/scratch"
            with s3_server():
                from rollmill.tasks.store.s3.s3_objects import s3_filesystem

                s3_filesystem().call_s3("create_bucket", Bucket="benchmark")
                remote = RunFolder("s3://benchmark/runs/run")
                copy_run(local, remote)
                figures["inspect_s3_s"], figures["column_s3_s"] = measure(remote, given.steps)
    for name, value in figures.items():
        print(f"{name:16} {value:8.2f}")
    print(json.dumps({"benchmark": "scan", "steps": given.steps, "rows": GROUPS * GROUP_SIZE} | figures))


if __name__ == "__main__":
    main()
