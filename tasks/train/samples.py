"""The rows of a batch, as arrays, straight from the data sets."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.errors import BatchRefusedError
from tasks.store.digest import batch_digest
from tasks.store.layout import RunFolder
from tasks.store.reader import read, read_trajectories
from tasks.store.routing import read_routing

_REMEDY = "; without the sampler's, train with train.behaviour=recomputed or train.loss=reinforce, and train.importance.mode=none"
_COLUMNS = ["trajectory_id", "env", "temperature", "token_ids", "loss_mask", "logprobs"]


@dataclass(frozen=True, slots=True)
class Samples:
    """The rows of a batch, in its order; each field has one entry a row.

    Attributes:
        trajectory_ids: [B].
        envs: [B] environments.
        temperatures: [B] sampling temperatures.
        advantages: [B] advantage of every trained token.
        token_ids: [B][T] tokens.
        loss_masks: [B][T] True on tokens to train; the first token is never one.
        logprobs: [B][T] nats, the sampler's; NaN where loss_mask is False, and where they are not known.
        old_logprobs: [B][T] nats, the trainer's before the step, NaN where loss_mask is False; None: the sampler's are
            gone by.
        reference_logprobs: [B][T] nats, the reference policy's, NaN where loss_mask is False; None without one.
        routing: [B][N, layers, experts a token] the experts that the first N tokens were routed to when they were
            sampled, N at most T - 1; None when the model's own choice counts.
    """

    trajectory_ids: list[str]
    envs: list[str]
    temperatures: np.ndarray
    advantages: np.ndarray
    token_ids: list[np.ndarray]
    loss_masks: list[np.ndarray]
    logprobs: list[np.ndarray]
    old_logprobs: list[np.ndarray] | None = None
    reference_logprobs: list[np.ndarray] | None = None
    routing: list[np.ndarray] | None = None

    @classmethod
    def known(cls, token_ids: list[np.ndarray], loss_masks: list[np.ndarray]) -> "Samples":
        """Sequences that no sampler made: temperature 1, no advantage."""
        n_rows = len(token_ids)
        return cls(
            trajectory_ids=[""] * n_rows,
            envs=[""] * n_rows,
            temperatures=np.ones(n_rows, np.float32),
            advantages=np.zeros(n_rows, np.float32),
            token_ids=token_ids,
            loss_masks=loss_masks,
            logprobs=[np.zeros(len(each), np.float32) for each in token_ids],
        )

    def has_spread(self, rows: list[int]) -> bool:
        """True when some of the rows has an advantage: without one every gradient is zero."""
        return bool(self.advantages[rows].any())

    def split(self, parts: int) -> list[list[int]]:
        """Row numbers of each of `parts` updates, in the batch's order, rows without a trained token left out.

        Example: five rows in two parts are [[0, 1, 2], [3, 4]].
        """
        rows = np.array([row for row, mask in enumerate(self.loss_masks) if mask.any()], np.int64)
        return [part.tolist() for part in np.array_split(rows, parts)]


def read_samples(folder: str, step: int) -> tuple[str, Samples]:
    """Digest and rows of a step's batch.

    Raises:
        ShardError: a shard cannot be read, or a trajectory of the batch is not there.
    """
    run = RunFolder(folder)
    batch = read(run, "batches", step=step).sort_by("order")
    parts = []
    for source, source_step in sorted(
        set(zip(batch["source"].to_pylist(), batch["source_step"].to_pylist(), strict=True))
    ):
        chosen = batch.filter((pc.field("source") == source) & (pc.field("source_step") == source_step))
        origin = RunFolder(source) if source else run
        rows = read_trajectories(origin, source_step, chosen["trajectory_id"].to_pylist(), _COLUMNS)
        parts.append(
            rows.append_column("advantage", chosen["advantage"]).append_column("order", chosen["order"])
        )
    return batch_digest(batch), _samples(pa.concat_tables(parts).sort_by("order") if parts else None)


def read_rollouts(folder: str, step: int, ids: Sequence[str]) -> Samples:
    """Stored rollouts of one step, in the order of `ids`, without advantages.

    Raises:
        ShardError: a shard cannot be read, or one of them is not there.
    """
    rows = read_trajectories(RunFolder(folder), step, ids, _COLUMNS)
    return _samples(rows.append_column("advantage", pa.array(np.zeros(len(ids), np.float32))))


def read_batch_routing(folder: str, step: int) -> list[np.ndarray]:
    """[B][N, layers, experts a token] routed experts of the rows of a step's batch, in its order; see Samples.routing.

    Raises:
        ShardError: a shard cannot be read, or some trajectories' experts are not there.
    """
    run = RunFolder(folder)
    batch = read(run, "batches", ["order", "trajectory_id", "source", "source_step"], step=step).sort_by(
        "order"
    )
    places: dict[tuple[str, int], list[int]] = {}
    rows = batch.to_pylist()
    for place, row in enumerate(rows):
        places.setdefault((row["source"], row["source_step"]), []).append(place)
    found: dict[int, np.ndarray] = {}
    for (source, source_step), chosen in places.items():
        origin = RunFolder(source) if source else run
        ids = [rows[place]["trajectory_id"] for place in chosen]
        found |= dict(zip(chosen, read_routing(origin, source_step, ids), strict=True))
    return [found[place] for place in range(len(rows))]


def _samples(rows: pa.Table | None) -> Samples:
    if rows is None:
        return Samples([], [], np.empty(0, np.float32), np.empty(0, np.float32), [], [], [])
    return Samples(
        trajectory_ids=rows["trajectory_id"].to_pylist(),
        envs=rows["env"].to_pylist(),
        temperatures=rows["temperature"].to_numpy(),
        advantages=rows["advantage"].to_numpy(),
        token_ids=arrays(rows["token_ids"]),
        loss_masks=arrays(rows["loss_mask"]),
        logprobs=arrays(rows["logprobs"]),
    )


def arrays(column: pa.ChunkedArray) -> list[np.ndarray]:
    """One array a row; views where Arrow's layout allows it."""
    return [
        row
        for chunk in column.chunks
        if len(chunk)
        for row in np.split(chunk.flatten().to_numpy(zero_copy_only=False), _inner(chunk))
    ]


def _inner(chunk: pa.LargeListArray) -> np.ndarray:
    offsets = chunk.offsets.to_numpy()
    return np.asarray(offsets[1:-1] - offsets[0])


def check_samples(samples: Samples, *, needs_sampler: bool = True) -> None:
    """Refuse rows that would put a NaN into the gradient, before any rank sees them.

    Args:
        samples: the rows.
        needs_sampler: False when a sampled token may have NaN for the sampler's log-probability: when the objective
            goes without.

    Raises:
        BatchRefusedError: names the trajectory and what is wrong with it.
    """
    for row, name in enumerate(samples.trajectory_ids):
        mask, logprobs = samples.loss_masks[row], samples.logprobs[row]
        if not len(samples.token_ids[row]) == len(mask) == len(logprobs):
            raise BatchRefusedError(
                f"trajectory {name}: {len(samples.token_ids[row])} token_ids, {len(mask)} of loss_mask, "
                f"{len(logprobs)} logprobs; they must be as many"
            )
        if len(mask) and mask[0]:
            raise BatchRefusedError(
                f"trajectory {name}: its first token is to be trained; nothing comes before it"
            )
        if np.isinf(logprobs[mask]).any() or (needs_sampler and np.isnan(logprobs[mask]).any()):
            remedy = "" if np.isinf(logprobs[mask]).any() else _REMEDY
            raise BatchRefusedError(
                f"trajectory {name}: a sampled token's log-probability is not finite{remedy}"
            )
        if not np.isfinite(samples.advantages[row]) or not samples.temperatures[row] > 0.0:
            raise BatchRefusedError(
                f"trajectory {name}: advantage {samples.advantages[row]}, temperature {samples.temperatures[row]}; "
                "expected a finite advantage and a temperature above 0"
            )


def check_lengths(samples: Samples, most_tokens: int) -> None:
    """Refuse a row that does not fit into a micro-batch; one without a trained token is never in one.

    Raises:
        BatchRefusedError: names the trajectory, its length and the setting.
    """
    for row in samples.split(1)[0]:
        if (n_tokens := len(samples.token_ids[row])) > most_tokens:
            raise BatchRefusedError(
                f"trajectory {samples.trajectory_ids[row]}: it has {n_tokens} tokens, and train.micro_batch_tokens is "
                f"{most_tokens}; raise that, or let rollouts be shorter (serve.max_model_len)"
            )


def n_trained_tokens(samples: Samples) -> int:
    """Tokens of all rows that are to be trained."""
    return sum(int(mask.sum()) for mask in samples.loss_masks)
