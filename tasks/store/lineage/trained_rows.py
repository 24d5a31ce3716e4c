"""The rows that made a step's batch: rollouts and scores of its trajectories, and a digest of each."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollmill.tasks.errors import ShardError
from rollmill.tasks.store.folders import PartitionValue, RunFolder
from rollmill.tasks.store.reader import read_chosen, read_trajectories
from rollmill.tasks.store.rows import name_first

# Lists by token, hashed as arrays: numpy type by column.
_TOKEN_COLUMNS = {"token_ids": "<i4", "loss_mask": "?", "logprobs": "<f4"}
# What was sampled, and what decided its reward. Times and servers are left out: they say how it was made, not what it is.
ROLLOUT_COLUMNS = (
    *("run", "step", "group", "sample", "attempt", "trajectory_id", "env", "example_id", "example"),
    *("temperature", "sampling_seed", "status", "version_span_starts", "version_span_versions", "messages"),
    *("segment_starts", "segment_parents", "segment_prefix_tokens", *_TOKEN_COLUMNS),
)
_SCORE_COLUMNS = (
    *("trajectory_id", "scorer", "version", "status", "reward", "turn_rewards", "token_rewards"),
    *("components", "subgroup"),
)


@dataclass(frozen=True, slots=True)
class TrainedRow:
    """A trajectory that a step was trained on.

    Attributes:
        location: folder of the run that stores its rollout.
        run: id of the run that sampled it.
        step, group, sample: where it is in that run.
        trained_step: step that trained on it.
        scorer: NAME@VERSION of its reward.
        digest: SHA-256 of its rollout and its score, 64 hex digits.
    """

    location: str
    run: str
    step: int
    group: int
    sample: int
    trajectory_id: str
    trained_step: int
    scorer: str
    reward: float
    advantage: float
    digest: str


def read_trained_rows(run: RunFolder, batch: pa.Table) -> list[TrainedRow]:
    """Read rollout and score of each row of a batch, in the batch's order, and compute their digests.

    Raises:
        ShardError: one is missing or damaged; names it.
    """
    columns = ["step", "trajectory_id", "reward", "advantage", "source", "source_step", "scorer"]
    trained = batch.sort_by("order").select(columns).to_pylist()
    places: dict[tuple[str, int, str], list[int]] = {}
    for place, row in enumerate(trained):
        places.setdefault((row["source"], row["source_step"], row["scorer"]), []).append(place)
    found: dict[int, TrainedRow] = {}
    for (source, step, scorer), at in places.items():
        folder = RunFolder(source) if source else run
        ids = [trained[place]["trajectory_id"] for place in at]
        rollouts = read_trajectories(folder, step, ids, ROLLOUT_COLUMNS)
        scores = read_matching(folder, "scores", ids, _SCORE_COLUMNS, scorer=scorer, step=step)
        keys = rollouts.select(["run", "step", "group", "sample"]).to_pylist()
        for place, key, digest in zip(at, keys, digest_rows(rollouts, scores), strict=True):
            row = trained[place]
            values = {name: row[name] for name in ("trajectory_id", "reward", "advantage")}
            found[place] = TrainedRow(
                folder.location, **key, **values, trained_step=row["step"], scorer=scorer, digest=digest
            )
    return [found[place] for place in range(len(trained))]


def combine_digests(rows: Iterable[TrainedRow]) -> str:
    """Return the SHA-256, 64 hex digits, of the digests of a batch's rows in their order."""
    return hashlib.sha256("".join(row.digest for row in rows).encode()).hexdigest()


def read_matching(
    folder: RunFolder, dataset: str, ids: Sequence[str], columns: Sequence[str], **partition: PartitionValue
) -> pa.Table:
    """Read the row of each trajectory in a partition, in the order of `ids`; ShardError names those that are missing.

    `columns` has trajectory_id.
    """
    stored = read_chosen(folder, dataset, ids, columns, (0, 1), **partition)
    places = pc.index_in(pa.array(ids, pa.string()), value_set=stored["trajectory_id"])
    if places.null_count:
        missing = [name for name, place in zip(ids, places.to_pylist(), strict=True) if place is None]
        where = folder.dataset(dataset, **partition)
        raise ShardError(f"{where} lacks the {dataset} of {len(missing)} trajectories: {name_first(missing)}")
    return stored.take(places)


def digest_rows(rollouts: pa.Table, others: pa.Table) -> list[str]:
    """Return the SHA-256 of what was sampled of each trajectory, and of its row in another table.

    Args:
        rollouts: rows with the columns of `rollouts`, or of `evaluations`.
        others: rows of the same trajectories in the same order.
    """
    facts = rollouts.select([name for name in ROLLOUT_COLUMNS if name not in _TOKEN_COLUMNS]).to_pylist()
    tokens = [split_lists(rollouts[name], kind) for name, kind in _TOKEN_COLUMNS.items()]
    digests = []
    for row in zip(facts, others.to_pylist(), *tokens, strict=True):
        digest = hashlib.sha256(json.dumps([list(each.values()) for each in row[:2]]).encode())
        for values in row[2:]:
            digest.update(values)
        digests.append(digest.hexdigest())
    return digests


def split_lists(column: pa.ChunkedArray, kind: str) -> Iterator[bytes]:
    """Yield the values of each row of a list column as bytes of a numpy type."""
    for chunk in column.chunks:
        offsets = chunk.offsets.to_numpy()
        values = np.asarray(chunk.values.to_numpy(zero_copy_only=False), kind)
        for start, end in pairwise(offsets.tolist()):
            yield values[start:end].tobytes()
