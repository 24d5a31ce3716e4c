"""Micro-batches as tensors, in two layouts.

`padded`: rows of like length, padded together on the right, a row of several segments as one row for each, with what the segment
inherits. With causal attention no real token sees what is to its right, so padding needs neither an attention mask nor position ids,
and its outputs are never selected.

`varlen`: rows one after another in a packed sequence, shared prefixes once, also those of a row's segments (see varlen).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from rollmill.tasks.train.engine.routing_replay import NO_EXPERT, experts_at
from rollmill.tasks.train.packing.packing_plan import Layout
from rollmill.tasks.train.packing.prefixes import group_by_prefix
from rollmill.tasks.train.packing.varlen import PackedSequence, build_sequence, sequence_positions
from rollmill.tasks.train.samples import Samples


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """M rows of a batch that go through the model together, and the N trained tokens among them.

    Attributes:
        row_numbers: [M] numbers of the rows in the batch.
        token_ids: [B, T] int64, the model's input.
        packed: how the rows are packed into one sequence; None when they are padded.
        places: [M][tokens of the row] positions of each row's tokens in the flattened [B * T]; where padded rows repeat a token
            that a segment inherits, that in its own segment.
        n_row_tokens: tokens of the rows, each segment's whole sequence written out; as many are computed without padding and
            without shared prefixes.
        positions: [N] int64, places in the flattened [B * T] of the tokens *before* the trained ones: the
            positions whose logits predict them. Row by row, in the order of `row_numbers`.
        rows: [N] int64, index of each trained token's row among the M.
        targets: [N] int64 trained token ids.
        temperatures: [N] float32 sampling temperatures.
        sampler_logprobs: [N] float32 nats, of the policy that sampled the tokens.
        old_logprobs: [N] float32 nats, of the policy that the probability ratio is against.
        reference_logprobs: [N] float32 nats; None when there is no reference policy.
        advantages: [N] float32.
        envs: [N] int64, index of each token's environment in the batch's sorted environments.
        routing: [B * T, layers, experts a token] int16 stored experts of every token, NO_EXPERT where it has none; None
            when the model's own choice counts.
    """

    row_numbers: list[int]
    token_ids: torch.Tensor
    packed: PackedSequence | None
    places: list[np.ndarray]
    n_row_tokens: int
    positions: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor
    temperatures: torch.Tensor
    sampler_logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    envs: torch.Tensor
    routing: torch.Tensor | None


def build_micro_batch(
    samples: Samples, rows: list[int], env_names: list[str], device: torch.device, layout: Layout
) -> MicroBatch:
    """Tensors of one micro-batch; without rows, two tokens of which none is trained.

    Args:
        samples: the batch.
        rows: numbers of its rows in the batch, in the order of the plan.
        env_names: the batch's environments, sorted.
        device: device of the tensors.
        layout: padded: rows side by side as [B, T]; varlen: rows packed into one sequence.
    """
    lay = _lay_padded if layout == "padded" else _lay_packed
    token_ids, places, written, packed = lay(samples, rows, device)
    trained = [np.flatnonzero(samples.loss_masks[row]) for row in rows]
    counts = [len(each) for each in trained]

    def select_trained(values: list[np.ndarray], kind: type) -> torch.Tensor:
        parts = [values[row][each] for row, each in zip(rows, trained, strict=True)]
        return _join(parts, kind, device)

    def repeat(values: np.ndarray, kind: type) -> torch.Tensor:
        return torch.from_numpy(np.repeat(values, counts).astype(kind)).to(device)

    # The logits at a token predict the next one of its segment.
    before = [
        place[samples.predecessors(row, each)] for row, place, each in zip(rows, places, trained, strict=True)
    ]
    return MicroBatch(
        row_numbers=rows,
        token_ids=torch.from_numpy(token_ids).to(device),
        packed=packed,
        places=places,
        n_row_tokens=sum(packed.lengths if packed else (len(each.tokens) for each in written)) if rows else 0,
        positions=_join(before, np.int64, device),
        rows=repeat(np.arange(len(rows)), np.int64),
        targets=select_trained(samples.token_ids, np.int64),
        temperatures=repeat(samples.temperatures[rows], np.float32),
        sampler_logprobs=select_trained(samples.logprobs, np.float32),
        old_logprobs=select_trained(samples.old_logprobs or samples.logprobs, np.float32),
        reference_logprobs=(
            select_trained(samples.reference_logprobs, np.float32) if samples.reference_logprobs else None
        ),
        advantages=_join([samples.trained_advantages(row) for row in rows], np.float32, device),
        envs=repeat(np.array([env_names.index(samples.envs[row]) for row in rows]), np.int64),
        routing=(
            _arrange_experts(samples, written, token_ids.size).to(device)
            if samples.routing is not None and rows
            else None
        ),
    )


class _Written(NamedTuple):
    """Where tokens of a row are written: their indices in the row, and their positions in the flattened [B * T]."""

    row: int
    tokens: np.ndarray
    positions: np.ndarray


_Laid = tuple[np.ndarray, list[np.ndarray], list[_Written], PackedSequence | None]


def _lay_padded(samples: Samples, rows: list[int], _: torch.device) -> _Laid:
    sequences = [(row, each) for row in rows for each in samples.sequences(row)]
    # Without rows two tokens go through the model, so that a rank without work takes part in the collectives.
    width = max((len(each) for _, each in sequences), default=2)
    token_ids = np.zeros((max(len(sequences), 1), width), np.int64)
    places = {row: np.empty(len(samples.token_ids[row]), np.int64) for row in rows}
    written = []
    for line, (row, tokens) in enumerate(sequences):
        token_ids[line, : len(tokens)] = samples.token_ids[row][tokens]
        written.append(_Written(row, tokens, line * width + np.arange(len(tokens))))
    # In reverse, so that a token's place is in the first sequence with it, that of the segment that the token was added in.
    for row, tokens, positions in reversed(written):
        places[row][tokens] = positions
    return token_ids, [places[row] for row in rows], written, None


def _lay_packed(samples: Samples, rows: list[int], device: torch.device) -> _Laid:
    found = sequence_positions(group_by_prefix(samples, rows))
    places = [found[row] for row in rows]
    token_ids = np.zeros((1, max((int(each[-1]) + 1 for each in places), default=2)), np.int64)
    for place, row in zip(places, rows, strict=True):
        token_ids[0, place] = samples.token_ids[row]
    written = [_Written(row, np.arange(len(place)), place) for row, place in zip(rows, places, strict=True)]
    sequences = [
        place[tokens] for row, place in zip(rows, places, strict=True) for tokens in samples.sequences(row)
    ]
    return token_ids, places, written, build_sequence(sequences or [np.arange(2)], device)


def _arrange_experts(samples: Samples, written: list[_Written], n_tokens: int) -> torch.Tensor:
    """Arrange the stored experts of all written tokens by position, as `experts_at` does."""
    assert samples.routing is not None
    routing = []
    for row, tokens, _ in written:
        stored, segments = samples.routing[row], samples.row_segments(row)
        if len(segments) > 1:
            # A segment's last token was sampled, not computed; what is stored of it has no meaning.
            by_token = np.full((len(samples.token_ids[row]), *stored.shape[1:]), NO_EXPERT, np.int16)
            by_token[: len(stored)] = stored
            by_token[[each.start - 1 for each in segments[1:]]] = NO_EXPERT
            stored = by_token[tokens]
        routing.append(stored)
    return experts_at(routing, [each.positions for each in written], n_tokens)


def _join(parts: list[np.ndarray], kind: type, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, kind), *parts]).astype(kind)).to(device)
