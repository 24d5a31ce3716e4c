"""Micro-batches as tensors, in two layouts.

`padded`: rows of like length, padded together on the right. With causal attention no real token sees what is to its
right, so padding needs neither an attention mask nor position ids, and its outputs are never selected.

`varlen`: rows one after another, what they share written once (see line).
"""

from dataclasses import dataclass

import numpy as np
import torch

from tasks.train.line import Line, line_of, line_places
from tasks.train.packing import Layout
from tasks.train.prefixes import units_of
from tasks.train.routing import experts_at
from tasks.train.samples import Samples


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """M rows of a batch that go through the model together, and the N trained tokens among them.

    Attributes:
        row_numbers: [M] which rows of the batch they are.
        token_ids: [B, T] int64, what the model is given.
        line: how its rows lie in it; None when they are padded.
        places: [M][tokens of the row] where each row's tokens are in the flattened [B * T].
        positions: [N] int64, places in the flattened [B * T] of the tokens *before* the trained ones: the
            positions whose logits predict them. Row by row, in the order of `row_numbers`.
        rows: [N] int64, which of the M rows each trained token is of.
        targets: [N] int64 trained token ids.
        temperatures: [N] float32.
        sampler_logprobs: [N] float32 nats.
        old_logprobs: [N] float32 nats, of the policy that the probability ratio is against.
        reference_logprobs: [N] float32 nats; None when there is no reference policy.
        advantages: [N] float32.
        envs: [N] int64, index into the sorted environments of the batch.
        routing: [B * T, layers, experts a token] int16 stored experts of every token, NO_EXPERT where it has none; None
            when the model's own choice counts.
    """

    row_numbers: list[int]
    token_ids: torch.Tensor
    line: Line | None
    places: list[np.ndarray]
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


def micro_batch(
    samples: Samples, rows: list[int], env_names: list[str], device: torch.device, layout: Layout
) -> MicroBatch:
    """Tensors of one micro-batch; without rows, two tokens of which none is trained.

    Args:
        samples: the batch.
        rows: which of its rows, in the order of the plan.
        env_names: the batch's environments, sorted.
        device: where the tensors are.
        layout: how the rows lie together.
    """
    token_ids, places, line = (_padded if layout == "padded" else _in_line)(samples, rows, device)
    trained = [np.flatnonzero(samples.loss_masks[row]) for row in rows]
    counts = [len(each) for each in trained]

    def at_trained(values: list[np.ndarray], kind: type) -> torch.Tensor:
        parts = [values[row][each] for row, each in zip(rows, trained, strict=True)]
        return _joined(parts, kind, device)

    def repeated(values: np.ndarray, kind: type) -> torch.Tensor:
        return torch.from_numpy(np.repeat(values, counts).astype(kind)).to(device)

    before = [place[each - 1] for place, each in zip(places, trained, strict=True)]
    return MicroBatch(
        row_numbers=rows,
        token_ids=torch.from_numpy(token_ids).to(device),
        line=line,
        places=places,
        positions=_joined(before, np.int64, device),
        rows=repeated(np.arange(len(rows)), np.int64),
        targets=at_trained(samples.token_ids, np.int64),
        temperatures=repeated(samples.temperatures[rows], np.float32),
        sampler_logprobs=at_trained(samples.logprobs, np.float32),
        old_logprobs=at_trained(samples.old_logprobs or samples.logprobs, np.float32),
        reference_logprobs=(
            at_trained(samples.reference_logprobs, np.float32) if samples.reference_logprobs else None
        ),
        advantages=repeated(samples.advantages[rows], np.float32),
        envs=repeated(np.array([env_names.index(samples.envs[row]) for row in rows]), np.int64),
        routing=_routing(samples, rows, places, token_ids.size, device),
    )


def _routing(
    samples: Samples, rows: list[int], places: list[np.ndarray], n_tokens: int, device: torch.device
) -> torch.Tensor | None:
    if samples.routing is None or not rows:
        return None
    return experts_at([samples.routing[row] for row in rows], places, n_tokens).to(device)


_Laid = tuple[np.ndarray, list[np.ndarray], Line | None]


def _padded(samples: Samples, rows: list[int], _: torch.device) -> _Laid:
    lengths = [len(samples.token_ids[row]) for row in rows]
    width = max(lengths, default=2)
    token_ids = np.zeros((max(len(rows), 1), width), np.int64)
    for place, row in enumerate(rows):
        token_ids[place, : lengths[place]] = samples.token_ids[row]
    return token_ids, [place * width + np.arange(length) for place, length in enumerate(lengths)], None


def _in_line(samples: Samples, rows: list[int], device: torch.device) -> _Laid:
    found = line_places(units_of(samples, rows))
    places = [found[row] for row in rows]
    token_ids = np.zeros((1, max((int(each[-1]) + 1 for each in places), default=2)), np.int64)
    for place, row in zip(places, rows, strict=True):
        token_ids[0, place] = samples.token_ids[row]
    return token_ids, places, line_of(places or [np.arange(2)], device)


def _joined(parts: list[np.ndarray], kind: type, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, kind), *parts]).astype(kind)).to(device)
