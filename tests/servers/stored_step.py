"""Rollouts and batch of a step, stored as a run stores them."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.schemas import dataset_schema, make_batch, ragged_array
from rollmill.tasks.store.segments import SEGMENT_COLUMNS
from rollmill.tasks.store.shards.shard import write_shard
from rollmill.tasks.store.shards.shard_names import ShardName
from rollmill.tasks.store.stored_batch import batch_digest

VOCABULARY = 57
EMPTY_TEXT = ("example_id", "example", "error_type", "error", "messages", "server")


class Branch(NamedTuple):
    """A further segment of a trajectory: the tokens that it inherits, and how many own ones of context and sampled ones it has."""

    parent: int
    prefix_tokens: int
    n_context: int
    n_completion: int


class Row(NamedTuple):
    """A trajectory of `n_prompt` prompt tokens and `n_completion` sampled ones, and of further segments.

    token_advantages: of each sampled token; empty: `advantage` is that of each.
    """

    n_prompt: int
    n_completion: int
    advantage: float
    env: str = "addition"
    temperature: float = 1.0
    branches: tuple[Branch, ...] = ()
    token_advantages: tuple[float, ...] = ()

    def loss_mask(self) -> np.ndarray:
        parts = [(self.n_prompt, self.n_completion), *(each[2:] for each in self.branches)]
        return np.concatenate([np.arange(sum(part)) >= part[0] for part in parts])

    def segments(self) -> list[list[int]]:
        """Start, parent, inherited tokens and messages of each segment."""
        found, start = [[0, -1, 0, 0]], self.n_prompt + self.n_completion
        for each in self.branches:
            found.append([start, each.parent, each.prefix_tokens, 0])
            start += each.n_context + each.n_completion
        return found


def uneven_rows(n_rows: int, seed: int = 0) -> list[Row]:
    """Rows whose lengths differ by a factor of twenty, one of them without a sampled token."""
    rng = np.random.default_rng(seed)
    rows = [
        Row(
            n_prompt=int(rng.choice([2, 8, 30, 120])),
            n_completion=int(rng.choice([1, 2, 5, 40, 90])),
            advantage=float(rng.normal()),
            env=["addition", "countdown"][int(rng.integers(2))],
            temperature=float(rng.choice([0.7, 1.0, 1.3])),
        )
        for _ in range(n_rows - 1)
    ]
    return [*rows, Row(5, 0, 1.0)]


def write_step(
    folder: Path,
    step: int,
    rows: list[Row],
    *,
    run: str = "r",
    seed: int = 0,
    token_ids: list[np.ndarray] | None = None,
) -> str:
    """Store rollouts and batch of a step, of random tokens where none are given; returns the batch's digest."""
    rng = np.random.default_rng([seed, step])
    masks = [row.loss_mask() for row in rows]
    lengths = [len(mask) for mask in masks]
    kind = dataset_schema("rollouts")
    columns: dict[str, object] = {
        name: [0] * len(rows) if not pa.types.is_large_list(kind.field(name).type) else [[]] * len(rows)
        for name in kind.names
    }
    columns |= dict.fromkeys(EMPTY_TEXT, [""] * len(rows))
    columns |= {
        "run": [run] * len(rows),
        "step": [step] * len(rows),
        "trajectory_id": [f"{run}-{step}-{i}" for i in range(len(rows))],
        "env": [row.env for row in rows],
        "temperature": [row.temperature for row in rows],
        "status": ["complete"] * len(rows),
        "finish_reason": ["stop"] * len(rows),
        "outcome": ["{}"] * len(rows),
        "token_ids": ragged_array(
            token_ids or [rng.integers(2, VOCABULARY, n) for n in lengths], kind.field("token_ids").type
        ),
        "loss_mask": ragged_array(masks, kind.field("loss_mask").type),
        "logprobs": ragged_array(
            [np.where(mask, rng.normal(-4.0, 0.3, len(mask)), np.nan) for mask in masks],
            kind.field("logprobs").type,
        ),
    }
    for place, name in enumerate(SEGMENT_COLUMNS):
        columns[name] = [[each[place] for each in row.segments()] for row in rows]
    rollouts = make_batch("rollouts", columns)
    batch = make_batch(
        "batches",
        {
            "run": [run] * len(rows),
            "step": [step] * len(rows),
            "order": list(range(len(rows))),
            "trajectory_id": columns["trajectory_id"],
            "group": [0] * len(rows),
            "sample": list(range(len(rows))),
            "env": columns["env"],
            "advantage": [row.advantage for row in rows],
            "token_advantages": [row.token_advantages for row in rows],
            "reward": [0.0] * len(rows),
            "source": [""] * len(rows),
            "source_step": [step] * len(rows),
            "scorer": ["addition@1"] * len(rows),
        },
    )
    replace_shard(folder, "rollouts", step, rollouts)
    replace_shard(folder, "batches", step, batch)
    return batch_digest(pa.Table.from_batches([batch]))


def replace_shard(folder: Path, dataset: str, step: int, rows: pa.RecordBatch) -> None:
    target = Path(RunFolder(folder).dataset(dataset, step=step))
    target.mkdir(parents=True, exist_ok=True)
    for before in target.glob("*.arrow"):
        before.unlink()
    name = write_shard(target / "shard", ShardName(1, 1), dataset, [rows])
    (target / "shard").rename(target / name)
