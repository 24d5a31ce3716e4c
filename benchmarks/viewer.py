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

from benchmarks.scan import made_up
from flows.viewer.address import Query
from flows.viewer.app import page
from flows.viewer.grid import ROWS_AT_ONCE
from flows.viewer.source import Page, Source
from tasks.store.config import StoreConfig
from tasks.store.filesystem import Files, files_of
from tasks.store.layout import RunFolder, partition_folder
from tasks.store.names import ShardName
from tasks.store.run import OpenRun
from tasks.store.shard import write_shard

GROUPS, GROUP_SIZE, N_METRICS, FAILED_EVERY = 125, 8, 60, 50
REFRESH_S = 2.0
SCORERS = ("addition@1", "brevity@1")


def rows_of_step(run: str, step: int) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Partition and rows of what a run stores of a step."""
    n, random = GROUPS * GROUP_SIZE, np.random.default_rng(step)
    groups = step * GROUPS + np.arange(n) // GROUP_SIZE
    samples = (np.arange(n) % GROUP_SIZE).astype(np.int32)
    is_failed = np.arange(n) % FAILED_EVERY == 7
    ids = [f"{run}.{group}.{sample}.0" for group, sample in zip(groups, samples, strict=True)]
    messages = [
        json.dumps(
            [
                {"role": "user", "content": f"{group} + 17 = ?"},
                {"role": "assistant", "content": "thinking " * 30},
            ]
        )
        for group in groups
    ]
    places = {"run": [run] * n, "trajectory_id": ids, "group": groups, "sample": samples}
    where = {"step": step}
    sampled = places | {
        "attempt": np.zeros(n, np.int32),
        "env": np.where(groups % 2, "calculator", "addition").tolist(),
        "status": np.where(is_failed, "failed", "complete").tolist(),
        "error_type": np.where(is_failed, "RequestError", "").tolist(),
        "error": np.where(is_failed, "503 from the server", "").tolist(),
        "n_completion_tokens": random.integers(5, 60, n).astype(np.int32),
        "policy_version_first": np.full(n, step, np.int32),
        "policy_version_last": np.full(n, step, np.int32),
        "messages": messages,
        "example": ['{"problem": "1 + 17"}'] * n,
        "outcome": ["{}"] * n,
        "version_span_starts": [[1]] * n,
        "version_span_versions": [[step]] * n,
        "duration_s": random.random(n),
    }
    yield partition_folder("rollouts", where), made_up("rollouts", n, step, **sampled)
    for scorer in SCORERS:
        name, _, version = scorer.partition("@")
        rewards = np.where(is_failed, np.nan, random.random(n))
        scored = places | {
            "scorer": [name] * n,
            "version": [version] * n,
            "status": ["scored"] * n,
            "error_type": [""] * n,
            "error": [""] * n,
            "reward": rewards,
            "components": ["{}"] * n,
            "subgroup": np.zeros(n, np.int32),
        }
        yield partition_folder("scores", {"scorer": scorer, **where}), made_up("scores", n, step, **scored)
    by_group = {
        "group": np.unique(groups),
        "subgroup": np.zeros(GROUPS, np.int32),
        "reward_mean": random.random(GROUPS),
        "reason": np.where(np.arange(GROUPS) % 5, "", "no_reward_spread").tolist(),
        "env": np.where(np.unique(groups) % 2, "calculator", "addition").tolist(),
    }
    yield partition_folder("groups", where), made_up("groups", GROUPS, step, **by_group)
    plan = {"first_group": [step * GROUPS], "n_groups": [GROUPS], "reason": ["plan"]}
    yield partition_folder("plans", where), made_up("plans", 1, step, **plan)
    trained = {
        name: [each for each, failed in zip(column, is_failed, strict=True) if not failed]
        for name, column in places.items()
    }
    n_trained = len(trained["trajectory_id"])
    batch = made_up(
        "batches",
        n_trained,
        step,
        trajectory_id=trained["trajectory_id"],
        scorer=["addition@1"] * n_trained,
        advantage=random.normal(size=n_trained).astype(np.float32),
    )
    yield partition_folder("batches", where), batch
    names = ["train/updated", "time/step_s", "drops/trajectories", "train/entropy_nats"]
    names += [f"stage/metric_{i}" for i in range(N_METRICS - len(names))]
    told = {
        "name": names,
        "env": ["all"] * N_METRICS,
        "stat": ["value"] * N_METRICS,
        "value": random.random(N_METRICS),
    }
    yield partition_folder("metrics", where), made_up("metrics", N_METRICS, step, **told)


def store_step(files: Files, run: str, step: int) -> None:
    for number, (folder, rows) in enumerate(rows_of_step(run, step)):
        name = ShardName(1, 10 * step + number, is_compacted=True)
        write = partial(write_shard, name=name, dataset=folder.partition("/")[0], appended=[rows])
        files.publish(folder, write)


def make_run(folder: RunFolder, steps: int) -> None:
    config_of = StoreConfig(root=folder.location.rpartition("/")[0])
    config = {"steps": steps, "evaluate": {"n_prompts": 0}, "score": {"scorer": "addition"}}
    with (
        OpenRun.open(
            folder, config=config, fixed=frozenset(), versions={}, git_commit="", config_of=config_of
        ) as run,
        ThreadPoolExecutor(2) as threads,
    ):
        list(threads.map(partial(store_step, files_of(folder), run.manifest.run), range(steps)))


def timed(work: Callable[[], object]) -> list[float]:
    """Wall and CPU seconds of the first time, and of the second."""
    spent = []
    for _ in range(2):
        started, used = time.perf_counter(), time.process_time()
        work()
        spent += [time.perf_counter() - started, time.process_time() - used]
    return spent


def rows(source: Source, search: str, start: int = 0) -> Page:
    query = Query.of(search)
    return source.trajectories(query.selection(), query["text"], start, start + ROWS_AT_ONCE)


def measure(folder: RunFolder, steps: int) -> dict[str, list[float]]:
    """Seconds of what pages ask, by what it is; each is a question of its own to the same viewer, in this order."""
    source, n = Source(folder, fresh_s=REFRESH_S / 2), steps * GROUPS * GROUP_SIZE
    asked: dict[str, Callable[[], object]] = {
        "trajectories, first page": lambda: rows(source, ""),
        "trajectories, a page amid": lambda: rows(source, "", n // 2),
        "failed trajectories": lambda: rows(source, "?status=failed"),
        "one trajectory": lambda: page(source, f"/trajectory/{steps * GROUPS // 2}.3", ""),
        "curves and steps": lambda: page(source, "/", ""),
        "groups, first page": lambda: source.groups(Query.of("").selection(), 0, ROWS_AT_ONCE),
        "by tokens, largest first": lambda: rows(source, "?sort=-n_completion_tokens"),
        "rewards above 0.99": lambda: rows(source, "?reward=0.99:"),
        "two scorers": lambda: page(source, "/compare", ""),
        "is there something new": source.revision,
    }
    return {name: timed(work) for name, work in asked.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--run", type=Path, help="a run that was made before; made anew in a new folder by default"
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
    slowest = {
        "slowest_first_s": max(first for first, *_ in found.values()),
        "slowest_again_s": max(again for _, _, again, _ in found.values()),
    }
    print(json.dumps({"benchmark": "viewer", "trajectories": n} | slowest | {"seconds": found}))


if __name__ == "__main__":
    main()
