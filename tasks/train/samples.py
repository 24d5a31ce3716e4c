"""The rows of a batch as NumPy arrays, read from the data sets."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from rollmill.tasks.errors import BatchRefusedError, ShardError
from rollmill.tasks.store.expert_routing import read_routing
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read, read_chosen, read_trajectories
from rollmill.tasks.store.rows import name_first
from rollmill.tasks.store.segments import (
    LINEAR,
    SEGMENT_COLUMNS,
    Segments,
    find_fault,
    index_predecessors,
    index_sequences,
    read_segments,
)
from rollmill.tasks.store.stored_batch import batch_digest

_REMEDY = "; without the sampler's, train with train.old_logprobs=trainer or train.loss=reinforce, and train.importance.mode=none"
_COLUMNS = [
    *("trajectory_id", "env", "temperature", "token_ids", "loss_mask", "logprobs"),
    *SEGMENT_COLUMNS,
]


class RowOutline(NamedTuple):
    """What every rank knows of a row's tokens, to plan which rank computes it.

    Attributes:
        n_tokens: tokens of the row, T.
        n_trained: tokens to train among them.
        n_segments: segments of the row.
        longest: tokens of its longest segment's whole sequence; T of a row of one segment.
        n_prefix: tokens before the first one to train, of the first segment; 0 without one.
        prefix_high: upper 64 bits of the XXH3-128 of those tokens, signed.
        prefix_low: lower 64 bits.
    """

    n_tokens: int
    n_trained: int
    n_segments: int
    longest: int
    n_prefix: int
    prefix_high: int
    prefix_low: int


@dataclass(frozen=True, slots=True)
class Samples:
    """Rows of a batch in the batch's order; each field has one entry for each of the B rows of T tokens.

    A row is a trajectory. Its T tokens are those of all its segments, as they are stored; what is said of a row, such as the mean of
    its losses, is said of the whole trajectory.

    Attributes:
        trajectory_ids: [B] ids of the trajectories.
        envs: [B] names of environments.
        temperatures: [B] sampling temperatures.
        advantages: [B] advantage of every trained token of a row, or the mean of its token_advantages.
        token_ids: [B][T] token ids.
        loss_masks: [B][T] True on tokens to train; the first token is never one.
        logprobs: [B][T] nats, the sampler's; NaN where loss_mask is False, and where they are not known.
        old_logprobs: [B][T] nats, the trainer's before the step, NaN where loss_mask is False; None if the loss uses the
            sampler's log-probabilities.
        reference_logprobs: [B][T] nats, the reference policy's, NaN where loss_mask is False; None without one.
        routing: [B][N, layers, experts a token] the experts that the first N tokens were routed to when they were
            sampled, N at most T - 1; None when the model's own choice counts.
        token_advantages: [B][n] advantages of the n trained tokens of a row; empty, or None for all rows: they all have that of
            the row.
        segments: [B] segments of the trajectories; None: each row is one sequence.
        outlines: [B] outlines of the rows, if the ranks hold different rows: then the fields of [B][T] values have empty arrays for
            rows that this rank does not hold. None: this process holds every row.
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
    token_advantages: list[np.ndarray] | None = None
    segments: list[Segments] | None = None
    outlines: Sequence[RowOutline] | None = None

    @classmethod
    def from_tokens(cls, token_ids: list[np.ndarray], loss_masks: list[np.ndarray]) -> "Samples":
        """Make rows from [T] token ids and [T] loss masks alone, to compute log-probabilities of known tokens.

        Temperatures are 1, advantages and the sampler's log-probabilities 0, ids and environments empty texts.
        """
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

    def outline(self, row: int) -> RowOutline:
        """Return the outline of a row, also of one that another rank holds."""
        if self.outlines is not None:
            return self.outlines[row]
        mask, segments = self.loss_masks[row], self.row_segments(row)
        n_prefix, longest = int(mask.argmax()) if len(mask) else 0, len(mask)
        if len(segments) > 1:
            n_prefix = min(n_prefix, segments[1].start)
            longest = max(map(len, self.sequences(row)), default=0)
        digest = xxhash.xxh3_128_digest(self.token_ids[row][:n_prefix].tobytes())
        high, low = np.frombuffer(digest, ">i8").tolist()
        return RowOutline(len(mask), int(mask.sum()), len(segments), longest, n_prefix, high, low)

    def row_segments(self, row: int) -> Segments:
        """Return the segments of a row that this rank holds."""
        return LINEAR if self.segments is None else self.segments[row]

    def sequences(self, row: int) -> list[np.ndarray]:
        """Return for each segment of a row that has own tokens the [L] indices into the row's T tokens of its whole sequence."""
        segments = self.row_segments(row)
        every = index_sequences(segments, len(self.token_ids[row]))
        return [
            each for each, segment in zip(every, segments, strict=True) if len(each) > segment.prefix_tokens
        ]

    def predecessors(self, row: int, tokens: np.ndarray) -> np.ndarray:
        """Return [N]: for each of the `tokens` [N] of a row, as indices, the index of the one before it in its segment; -1: none."""
        segments = self.row_segments(row)
        return (
            tokens - 1
            if len(segments) == 1
            else index_predecessors(segments, len(self.token_ids[row]))[tokens]
        )

    def has_advantage(self, row: int) -> bool:
        """Return True if a trained token of the row has an advantage other than 0; if none has, the policy gradient is zero."""
        by_token = self.token_advantages[row] if self.token_advantages is not None else ()
        return bool(np.any(by_token) if len(by_token) else self.advantages[row])

    def trained_advantages(self, row: int) -> np.ndarray:
        """Return [n] float32 advantages of the n trained tokens of a row that this rank holds."""
        by_token = self.token_advantages[row] if self.token_advantages is not None else ()
        if len(by_token):
            return np.asarray(by_token, np.float32)
        return np.full(int(self.loss_masks[row].sum()), self.advantages[row], np.float32)

    def n_trained(self, rows: Iterable[int]) -> int:
        """Number of tokens to train among the rows."""
        return sum(self.outline(row).n_trained for row in rows)

    def split_by_row(self, rows: Sequence[int], values: np.ndarray) -> dict[int, np.ndarray]:
        """Split [..., N] values of the rows' trained tokens, in the order of `rows`, into [..., n] values by row number."""
        ends = np.cumsum([self.loss_masks[row].sum() for row in rows], dtype=np.int64)
        parts = np.split(values, ends[:-1], axis=-1) if rows else []
        return dict(zip(rows, parts, strict=True))

    def split(self, parts: int) -> list[list[int]]:
        """Row numbers of each of `parts` updates, in the batch's order, without rows that have no trained token.

        Example: five rows in two parts are [[0, 1, 2], [3, 4]].
        """
        n_rows = len(self.trajectory_ids)
        rows = np.array([row for row in range(n_rows) if self.outline(row).n_trained], np.int64)
        return [part.tolist() for part in np.array_split(rows, parts)]


def read_samples(folder: str, step: int, *, with_routing: bool = False) -> tuple[str, Samples]:
    """Digest and rows of a step's batch.

    Args:
        folder: folder of the run.
        step: step of the batch.
        with_routing: True to read the rows' routed experts too.

    Raises:
        ShardError: a shard cannot be read, or a trajectory of the batch, or its routed experts, are not there.
    """
    digest, samples, held = read_portion(folder, step, (0, 1), with_routing=with_routing)
    check_found(samples, [int(row in held) for row in range(len(samples.trajectory_ids))])
    return digest, samples


def read_portion(
    folder: str, step: int, portion: tuple[int, int], *, with_routing: bool = False
) -> tuple[str, Samples, set[int]]:
    """Read a step's batch, and of its stored rollouts the i-th of n portions, given as (i, n), about equal in bytes.

    Returns:
        The batch's digest; all its rows, of which those in other portions have temperature 1 and empty arrays for [T] values; and
        the numbers of the rows in this portion.

    Raises:
        ShardError: a shard cannot be read, or routed experts of a rollout are not there.
    """
    run = RunFolder(folder)
    batch = read(run, "batches", step=step).sort_by("order")
    batch = batch.append_column("row", pa.array(range(batch.num_rows), pa.int64()))
    samples = no_tokens(
        Samples(
            trajectory_ids=batch["trajectory_id"].to_pylist(),
            envs=batch["env"].to_pylist(),
            temperatures=np.ones(batch.num_rows, np.float32),
            advantages=batch["advantage"].to_numpy(),
            token_ids=[],
            loss_masks=[],
            logprobs=[],
            routing=[] if with_routing else None,
            token_advantages=split_rows(batch["token_advantages"]),
        )
    )
    held = set[int]()
    # Rows of an older step, or of another run, are read where they are stored.
    for source, source_step in sorted(
        set(zip(batch["source"].to_pylist(), batch["source_step"].to_pylist(), strict=True))
    ):
        chosen = batch.filter((pc.field("source") == source) & (pc.field("source_step") == source_step))
        origin, ids = RunFolder(source) if source else run, chosen["trajectory_id"]
        stored = read_chosen(origin, "rollouts", ids.to_pylist(), _COLUMNS, portion, step=source_step)
        places = pc.index_in(ids, value_set=stored["trajectory_id"])
        rows, found = chosen["row"].filter(places.is_valid()).to_pylist(), stored.take(places.drop_null())
        samples.temperatures[rows] = found["temperature"].to_numpy()
        assert samples.segments is not None, "no_tokens makes them"
        columns: list[tuple[list[Any], Sequence[object]]] = [
            (samples.token_ids, split_rows(found["token_ids"])),
            (samples.loss_masks, split_rows(found["loss_mask"])),
            (samples.logprobs, split_rows(found["logprobs"])),
            (samples.segments, split_segments(found)),
        ]
        if samples.routing is not None:
            routing = read_routing(origin, source_step, found["trajectory_id"].to_pylist())
            columns.append((samples.routing, routing))
        for own, values in columns:
            for row, each in zip(rows, values, strict=True):
                own[row] = each
        held.update(rows)
    return batch_digest(batch), samples, held


def no_tokens(samples: Samples) -> Samples:
    """Return the rows of a batch with an empty array for each [T] value."""
    n_rows = len(samples.trajectory_ids)
    return replace(
        samples,
        token_ids=[np.empty(0, np.int32)] * n_rows,
        loss_masks=[np.empty(0, bool)] * n_rows,
        logprobs=[np.empty(0, np.float32)] * n_rows,
        segments=[LINEAR] * n_rows,
        routing=None if samples.routing is None else [np.empty((0, 0, 0), np.int16)] * n_rows,
    )


def check_found(samples: Samples, n_found: Sequence[int]) -> None:
    """Raise ShardError, which names them, if some of the [B] rows were not found once in all portions together."""
    if wrong := [name for name, n in zip(samples.trajectory_ids, n_found, strict=True) if n != 1]:
        raise ShardError(
            f"of {len(n_found)} trajectories of the batch, {len(wrong)} are not stored, or shards were joined while they were read; run "
            f"again, and if it stays, `rollmill verify` says what is missing: {name_first(wrong)}"
        )


def read_rollouts(folder: str, step: int, ids: Sequence[str], *, with_routing: bool = False) -> Samples:
    """Stored rollouts of one step, in the order of `ids`, without advantages; with their routed experts if requested.

    Args:
        folder: folder of the run.
        step: step that they were stored at.
        ids: ids of the trajectories.
        with_routing: True to read their routed experts too.

    Raises:
        ShardError: a shard cannot be read, or a rollout or its routed experts are not there.
    """
    rows = read_trajectories(RunFolder(folder), step, ids, _COLUMNS)
    samples = _samples(rows.append_column("advantage", pa.array(np.zeros(len(ids), np.float32))))
    return replace(samples, routing=read_routing(RunFolder(folder), step, ids)) if with_routing else samples


def _samples(rows: pa.Table) -> Samples:
    return Samples(
        trajectory_ids=rows["trajectory_id"].to_pylist(),
        envs=rows["env"].to_pylist(),
        temperatures=rows["temperature"].to_numpy(),
        advantages=rows["advantage"].to_numpy(),
        token_ids=split_rows(rows["token_ids"]),
        loss_masks=split_rows(rows["loss_mask"]),
        logprobs=split_rows(rows["logprobs"]),
        segments=split_segments(rows),
    )


def split_segments(rows: pa.Table) -> list[Segments]:
    """Return the segments of each row of `rollouts`; rows of one segment share an object."""
    found = [LINEAR] * rows.num_rows
    counts = pc.list_value_length(rows["segment_starts"]).to_numpy()
    for row in np.flatnonzero(counts != 1).tolist():
        found[row] = read_segments({name: rows[name][row].as_py() for name in SEGMENT_COLUMNS})
    return found


def split_rows(column: pa.ChunkedArray) -> list[np.ndarray]:
    """Split a list column into one array a row; views where Arrow's layout allows it."""
    rows: list[np.ndarray] = []
    for chunk in column.chunks:
        if len(chunk):
            # A sliced chunk keeps the offsets of the whole one, so its first may be above 0.
            offsets = chunk.offsets.to_numpy()
            rows += np.split(chunk.flatten().to_numpy(zero_copy_only=False), offsets[1:-1] - offsets[0])
    return rows


def check_samples(samples: Samples, *, needs_sampler: bool = True) -> None:
    """Refuse rows that would put a NaN into the gradient, before any rank sees them.

    Args:
        samples: the rows.
        needs_sampler: False when a trained token may have NaN for the sampler's log-probability, since the objective does not
            use it.

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
        if fault := find_fault(samples.row_segments(row), len(mask)):
            raise BatchRefusedError(f"trajectory {name}: {fault}")
        firsts = [each.start for each in samples.row_segments(row) if not each.prefix_tokens]
        if len(mask) and mask[[each for each in firsts if each < len(mask)]].any():
            raise BatchRefusedError(
                f"trajectory {name}: its first token is to be trained; nothing comes before it"
            )
        if np.isinf(logprobs[mask]).any() or (needs_sampler and np.isnan(logprobs[mask]).any()):
            remedy = "" if np.isinf(logprobs[mask]).any() else _REMEDY
            raise BatchRefusedError(
                f"trajectory {name}: a sampled token's log-probability is not finite{remedy}"
            )
        by_token = samples.token_advantages[row] if samples.token_advantages is not None else ()
        if len(mask) and len(by_token) not in (0, int(mask.sum())):
            raise BatchRefusedError(
                f"trajectory {name}: {len(by_token)} token_advantages, and {int(mask.sum())} tokens to train; they must be as many"
            )
        if len(mask) and not np.isfinite(by_token).all():
            raise BatchRefusedError(f"trajectory {name}: some of its token_advantages are not finite")
        if not np.isfinite(samples.advantages[row]) or not samples.temperatures[row] > 0.0:
            raise BatchRefusedError(
                f"trajectory {name}: advantage {samples.advantages[row]}, temperature {samples.temperatures[row]}; "
                "expected a finite advantage and a temperature above 0"
            )


def check_lengths(samples: Samples, most_tokens: int, *, is_padded: bool) -> None:
    """Refuse a row with a trained token that takes more than a micro-batch of `most_tokens` tokens.

    With `is_padded`, each segment of a row is computed by itself, and padded to the longest.

    Raises:
        BatchRefusedError: names the trajectory, its tokens and the setting.
    """
    for row in samples.split(1)[0]:
        outline = samples.outline(row)
        n_tokens, what = outline.n_tokens, f"it has {outline.n_tokens} tokens"
        if is_padded and outline.n_segments > 1:
            n_tokens = outline.n_segments * outline.longest
            what = f"its {outline.n_segments} segments, padded to {outline.longest} tokens, take {n_tokens}"
        if n_tokens > most_tokens:
            raise BatchRefusedError(
                f"trajectory {samples.trajectory_ids[row]}: {what}, and train.micro_batch_tokens is {most_tokens}; raise that, since "
                "the batch is stored; where rows are padded, train.layout=padded makes later episodes of several segments end earlier"
            )
