"""Micro-batches as tensors: rows of like length, padded together on the right.

With causal attention no real token sees what is to its right, so padding needs neither an attention mask nor
position ids, and its outputs are never selected.
"""

from dataclasses import dataclass

import numpy as np
import torch

from tasks.train.samples import Samples


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """B rows padded to T tokens, and the N trained tokens among them.

    Attributes:
        token_ids: [B, T] int64.
        positions: [N] int64, places in the flattened [B * T] of the tokens *before* the trained ones: the
            positions whose logits predict them.
        targets: [N] int64 trained token ids.
        temperatures: [N] float32.
        sampler_logprobs: [N] float32 nats.
        advantages: [N] float32.
        envs: [N] int64, index into the sorted environments of the batch.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    temperatures: torch.Tensor
    sampler_logprobs: torch.Tensor
    advantages: torch.Tensor
    envs: torch.Tensor


def padded(samples: Samples, rows: list[int], env_names: list[str], device: torch.device) -> PaddedRows:
    """Tensors of one micro-batch; without rows, two tokens of which none is trained."""
    lengths = [len(samples.token_ids[row]) for row in rows]
    width = max(lengths, default=2)
    token_ids = np.zeros((max(len(rows), 1), width), np.int64)
    for place, row in enumerate(rows):
        token_ids[place, : lengths[place]] = samples.token_ids[row]
    trained = [np.flatnonzero(samples.loss_masks[row]) for row in rows]
    counts = [len(each) for each in trained]
    return PaddedRows(
        token_ids=torch.from_numpy(token_ids).to(device),
        positions=_joined([place * width + each - 1 for place, each in enumerate(trained)], np.int64, device),
        targets=_joined(
            [samples.token_ids[row][each] for row, each in zip(rows, trained, strict=True)], np.int64, device
        ),
        temperatures=_repeated(samples.temperatures[rows], counts, np.float32, device),
        sampler_logprobs=_joined(
            [samples.logprobs[row][each] for row, each in zip(rows, trained, strict=True)], np.float32, device
        ),
        advantages=_repeated(samples.advantages[rows], counts, np.float32, device),
        envs=_repeated(
            np.array([env_names.index(samples.envs[row]) for row in rows]), counts, np.int64, device
        ),
    )


def _joined(parts: list[np.ndarray], kind: type, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, kind), *parts]).astype(kind)).to(device)


def _repeated(values: np.ndarray, counts: list[int], kind: type, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.repeat(values, counts).astype(kind)).to(device)
