"""How long does the viewer take over a million trajectories? 1,000 steps x 125 groups x 8, made up.

Each step's partitions have one shard, as after its compaction. The times are those of what a page asks of the run,
in this process: the first of each, with nothing read before but what the lines above it read, and the second.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.scan import make_rows
from rollmill.flows.configuration.recipe import run_tokenizer
from rollmill.tasks.look.web.app import render_page
from rollmill.tasks.look.web.grid import ROWS_AT_ONCE
from rollmill.tasks.look.web.run_data import RunData, TablePage
from rollmill.tasks.look.web.urls import Query
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import Files, open_files
from rollmill.tasks.store.folders import RunFolder, partition_folder
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.segments import SEGMENT_COLUMNS
from rollmill.tasks.store.shards.shard import write_shard
from rollmill.tasks.store.shards.shard_names import ShardName

GROUPS, GROUP_SIZE, N_METRICS, FAILED_EVERY = 125, 8, 60, 50
REFRESH_S = 2.0
SCORERS = ("addition@1", "brevity@1")


class MadeUpStep:
    """What a run stores of a step, made up."""

    def __init__(self, run: str, step: int) -> None:
        n = GROUPS * GROUP_SIZE
        self._n, self._step, self._random = n, step, np.random.default_rng(step)
        self._of_group = step * GROUPS + np.arange(n) // GROUP_SIZE
        self._is_failed = np.arange(n) % FAILED_EVERY == 7
        samples = (np.arange(n) % GROUP_SIZE).astype(np.int32)
        pairs = zip(self._of_group, samples, strict=True)
        self._ids = [f"{run}.{group}.{sample}.0" for group, sample in pairs]
        places = {"run": [run] * n, "trajectory_id": self._ids}
        self._places = places | {"group": self._of_group, "sample": samples}

    def rows(self) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Partition and rows of each data set."""
        where = {"step": self._step}
        yield partition_folder("rollouts", where), self._rollouts()
        for scorer in SCORERS:
            yield partition_folder("scores", {"scorer": scorer, **where}), self._scores(scorer)
        yield partition_folder("groups", where), self._groups()
        plan = {
            "first_group": [self._step * GROUPS],
            "n_groups": [GROUPS],
            "reason": ["plan"],
            "problems": [[]],
        }
        yield partition_folder("plans", where), make_rows("plans", 1, self._step, **plan)
        yield partition_folder("batches", where), self._batch()
        yield partition_folder("metrics", where), self._metrics()

    def _rollouts(self) -> pa.RecordBatch:
        n, step = self._n, self._step
        columns = self._places | {
            "attempt": np.zeros(n, np.int32),
            "env": np.where(self._of_group % 2, "calculator", "addition").tolist(),
            "status": np.where(self._is_failed, "failed", "complete").tolist(),
            "error_type": np.where(self._is_failed, "RequestError", "").tolist(),
            "error": np.where(self._is_failed, "503 from the server", "").tolist(),
            "n_completion_tokens": self._random.integers(5, 60, n).astype(np.int32),
            "policy_version_first": np.full(n, step, np.int32),
            "policy_version_last": np.full(n, step, np.int32),
            "messages": [_messages(group) for group in self._of_group.tolist()],
            **dict.fromkeys(("message_segments", *SEGMENT_COLUMNS), [[]] * n),  # one segment, as most have
            "example": ['{"problem": "1 + 17"}'] * n,
            "outcome": ["{}"] * n,
            "version_span_starts": [[1]] * n,
            "version_span_versions": [[step]] * n,
            "duration_s": self._random.random(n),
        }
        return make_rows("rollouts", n, step, **columns)

    def _scores(self, scorer: str) -> pa.RecordBatch:
        n, (name, _, version) = self._n, scorer.partition("@")
        columns = self._places | {
            "scorer": [name] * n,
            "version": [version] * n,
            "status": ["scored"] * n,
            "error_type": [""] * n,
            "error": [""] * n,
            "reward": np.where(self._is_failed, np.nan, self._random.random(n)),
            "turn_rewards": [[]] * n,
            "token_rewards": [[]] * n,
            "components": ["{}"] * n,
            "subgroup": np.zeros(n, np.int32),
        }
        return make_rows("scores", n, self._step, **columns)

    def _groups(self) -> pa.RecordBatch:
        groups = np.unique(self._of_group)
        columns = {
            "group": groups,
            "subgroup": np.zeros(GROUPS, np.int32),
            "reward_mean": self._random.random(GROUPS),
            "reason": np.where(np.arange(GROUPS) % 5, "", "no_reward_spread").tolist(),
            "env": np.where(groups % 2, "calculator", "addition").tolist(),
        }
        return make_rows("groups", GROUPS, self._step, **columns)

    def _batch(self) -> pa.RecordBatch:
        ids = zip(self._ids, self._is_failed, strict=True)
        trained = [each for each, failed in ids if not failed]
        columns = {
            "trajectory_id": trained,
            "scorer": ["addition@1"] * len(trained),
            "advantage": self._random.normal(size=len(trained)).astype(np.float32),
            "token_advantages": [[]] * len(trained),
            "source": [""] * len(trained),
            "source_step": [self._step] * len(trained),
        }
        return make_rows("batches", len(trained), self._step, **columns)

    def _metrics(self) -> pa.RecordBatch:
        names = ["train/updated", "time/step_s", "drops/trajectories", "train/entropy_nats"]
        columns = {
            "name": [*names, *(f"stage/metric_{i}" for i in range(N_METRICS - len(names)))],
            "env": ["all"] * N_METRICS,
            "stat": ["value"] * N_METRICS,
            "value": self._random.random(N_METRICS),
        }
        return make_rows("metrics", N_METRICS, self._step, **columns)


def _messages(group: int) -> str:
    question, answer = f"{group} + 17 = ?", "thinking " * 30
    return json.dumps([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


def store_step(files: Files, run: str, step: int) -> None:
    for number, (folder, rows) in enumerate(MadeUpStep(run, step).rows()):
        name = ShardName(1, 10 * step + number, is_compacted=True)
        write = partial(write_shard, name=name, dataset=folder.partition("/")[0], appended=[rows])
        files.publish(folder, write)


def make_run(folder: RunFolder, steps: int) -> None:
    config_of = StoreConfig(root=folder.location.rpartition("/")[0])
    config = {"steps": steps, "evaluate": {"n_prompts": 0}, "score": {"scorer": "addition"}}
    with (
        OpenRun.open(folder, config=config, fixed={}, versions={}, git_commit="", config_of=config_of) as run,
        ThreadPoolExecutor(2) as threads,
    ):
        list(threads.map(partial(store_step, open_files(folder), run.manifest.run), range(steps)))


def time_twice(work: Callable[[], object]) -> list[float]:
    """Wall and CPU seconds of the first time, and of the second."""
    spent = []
    for _ in range(2):
        started, used = time.perf_counter(), time.process_time()
        work()
        spent += [time.perf_counter() - started, time.process_time() - used]
    return spent


def rows(source: RunData, search: str, start: int = 0) -> TablePage:
    query = Query.of(search)
    return source.trajectories(query.selection(), query["text"], start, start + ROWS_AT_ONCE)


def measure(folder: RunFolder, steps: int) -> dict[str, list[float]]:
    """Return the seconds of each kind of query that a page makes, sent to the same viewer one after another, in this order."""
    source, n = RunData(folder, REFRESH_S / 2, run_tokenizer), steps * GROUPS * GROUP_SIZE
    asked: dict[str, Callable[[], object]] = {
        "trajectories, first page": lambda: rows(source, ""),
        "trajectories, a page amid": lambda: rows(source, "", n // 2),
        "failed trajectories": lambda: rows(source, "?status=failed"),
        "one trajectory": lambda: render_page(source, f"/trajectory/{steps * GROUPS // 2}.3", ""),
        "curves and steps": lambda: render_page(source, "/", ""),
        "groups, first page": lambda: source.groups(Query.of("").selection(), 0, ROWS_AT_ONCE),
        "by tokens, largest first": lambda: rows(source, "?sort=-n_completion_tokens"),
        "rewards above 0.99": lambda: rows(source, "?reward=0.99:"),
        "two scorers": lambda: render_page(source, "/compare", ""),
        "is there something new": source.revision,
    }
    return {name: time_twice(work) for name, work in asked.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--run", type=Path, help="a stored run to use; by default one is made in a new folder"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder(given.run or f"{root}/run")
        if not given.run:
            make_run(folder, given.steps)
        found = measure(folder, given.steps)
    print(f"{'seconds':28}{'first':>8}{'its CPU':>8}{'again':>8}{'its CPU':>8}")
    for name, spent in found.items():
        print(f"{name:28}" + "".join(f"{each:8.3f}" for each in spent))
    n = given.steps * GROUPS * GROUP_SIZE
    page = found["trajectories, first page"]
    slowest = {
        "first_page_s": page[0],
        "first_page_again_s": page[2],
        "slowest_first_s": max(first for first, *_ in found.values()),
        "slowest_again_s": max(again for _, _, again, _ in found.values()),
    }
    print(json.dumps({"benchmark": "viewer", "trajectories": n} | slowest | {"seconds": found}))


if __name__ == "__main__":
    main()
