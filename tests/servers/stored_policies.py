"""Exported policies with evaluations of known rewards, as the gate reads them."""

import random
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder, partition_folder
from rollmill.tasks.store.lineage.lineage_writer import write_lineage
from rollmill.tasks.store.run.manifest import Manifest, write_manifest
from rollmill.tasks.store.schemas import SCHEMA_VERSION, dataset_schema, make_batch
from rollmill.tasks.store.shards.shard import write_shard
from rollmill.tasks.store.shards.shard_names import ShardName
from tests.stubs.toy_settings import toy_config

VERSION = 1


class Rewards(NamedTuple):
    """Rewards of an evaluation: [P] greedy, [P, K] sampled."""

    greedy: np.ndarray
    sampled: np.ndarray


def draw_rewards(seed: int, n_prompts: int, drop: float = 0.0, samples: int = 4) -> Rewards:
    """Draw right and wrong answers of a policy to prompts of difficulty 0.2 to 1, each solved less often by `drop`, at most 0.2.

    The difficulty of a prompt is the same for every seed. Of ten greedy answers nine are those of any other policy with this drop.
    """
    solved = np.random.default_rng(0).uniform(0.2, 1.0, n_prompts) - drop
    rng = np.random.default_rng([1, seed])
    usual = np.random.default_rng(2).uniform(size=n_prompts) < solved
    greedy = np.where(rng.uniform(size=n_prompts) < 0.9, usual, rng.uniform(size=n_prompts) < solved)
    sampled = rng.uniform(size=(n_prompts, samples)) < solved[:, None]
    return Rewards(greedy.astype(float), sampled.astype(float))


def begin_run(folder: RunFolder, model: Path, n_prompts: int, samples: int, **settings: Any) -> None:
    """Begin a run that has evaluations of so many prompts."""
    values = {"model": str(model), "evaluate": {"n_prompts": n_prompts, "samples": samples}, **settings}
    config = toy_config(values).model_dump(mode="json")
    folder.tmp.mkdir(parents=True, exist_ok=True)
    manifest = Manifest(folder.name, 1, 1, SCHEMA_VERSION, config, {}, "", "", "finished")
    write_manifest(open_files(folder), manifest, None)


def store_evaluation(
    folder: RunFolder,
    rewards: Rewards,
    version: int = VERSION,
    first_prompt: int = 0,
    *,
    dropped: bool = False,
) -> None:
    """Store an evaluation with these rewards, of prompts that are numbered from `first_prompt`.

    On an answer of reward NaN the scorer failed; with `dropped` it dropped it.
    """
    n, k = rewards.sampled.shape
    answers = [(prompt, sample) for prompt in range(n) for sample in range(k + 1)]
    by_answer = np.concatenate([rewards.greedy[:, None], rewards.sampled], axis=1).reshape(-1)
    columns: dict[str, Any] = {
        "run": [folder.name] * len(answers),
        "group": [prompt for prompt, _ in answers],
        "sample": [sample for _, sample in answers],
        "trajectory_id": [f"{folder.name}.v{version}.{prompt}.{sample}" for prompt, sample in answers],
        "env": ["addition"] * len(answers),
        "example_id": [str(first_prompt + prompt) for prompt, _ in answers],
        "status": ["complete"] * len(answers),
        "policy_version": [version] * len(answers),
        "greedy": [sample == 0 for _, sample in answers],
        "reward": by_answer.tolist(),
        "error_type": ["ScorerError" if np.isnan(reward) and not dropped else "" for reward in by_answer],
    }
    store_rows(folder, "evaluations", columns, version=version)


def store_rows(folder: RunFolder, dataset: str, columns: dict[str, Any], **partition: str | int) -> None:
    """Store rows of a data set in one shard of a partition; columns that are not given are empty or 0."""
    n = len(next(iter(columns.values())))
    empty: dict[str, Any] = {
        field.name: [[] if pa.types.is_large_list(field.type) else 0] * n
        if not pa.types.is_string(field.type) and not pa.types.is_large_string(field.type)
        else [""] * n
        for field in dataset_schema(dataset)
    }
    rows = make_batch(dataset, empty | columns)
    name = ShardName(1, int(partition.get("version", partition.get("step", 0))))
    write = partial(write_shard, name=name, dataset=dataset, appended=[rows])
    open_files(folder).publish(partition_folder(dataset, partition), write)


def store_policy(folder: RunFolder, model: Path, seed: int = 0) -> RunFolder:
    """Export a policy of a run, with random bytes as its weights."""
    policy = folder.policy(VERSION)
    policy.mkdir(parents=True)
    (policy / "model.safetensors").write_bytes(random.Random(f"{folder.name} {seed}").randbytes(2000))
    write_lineage(policy, folder, VERSION, model)
    return RunFolder(policy)


def make_policy(root: Path, name: str, rewards: Rewards | None, **settings: Any) -> RunFolder:
    """Make a run of this name below `root`/runs with an exported policy and, unless None, its evaluation."""
    model = root / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    folder = RunFolder(root / "runs" / name)
    n, k = rewards.sampled.shape if rewards else (60, 4)
    begin_run(folder, model, n, k, **settings)
    if rewards:
        store_evaluation(folder, rewards)
    return store_policy(folder, model)
