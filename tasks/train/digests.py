"""Digests of all that a version is: equal exactly when weights and moments are, byte for byte, on any ranks."""

import hashlib

import torch
import torch.distributed as dist

from tasks.train.engine import Engine
from tasks.train.state import KINDS
from tasks.train.weights import named_weights


def tensor_digests(engine: Engine) -> dict[str, str]:
    """SHA-256 of every tensor, 64 hex digits, by name; a collective, whose result counts on rank 0.

    "weights/NAME" are the weights as a checkpoint of Hugging Face names them, in the type that the model computes
    with; "weight/NAME", "exp_avg/NAME" and "exp_avg_sq/NAME" are what the optimizer keeps of a parameter, in single
    precision, and "updates/NAME" is how often it has moved it. One tensor at a time is brought together.
    """
    digests = {f"weights/{name}": digest_of(each) for name, each in named_weights(engine.model)}
    state, rank = engine.state, dist.get_rank()
    parts = {part.name: part for part in state.own_parts(rank, dist.get_world_size())}
    for name in state.shapes:
        part = parts.get(name)
        for kind in KINDS:
            held = (part.start, state.tensor(kind, part).cpu()) if part else None
            if ranges := _gathered(held):
                whole = torch.cat([numbers for _, numbers in sorted(ranges, key=lambda each: each[0])])
                digests[f"{kind}/{name}"] = digest_of(whole)
        if counts := _gathered((0, torch.tensor(state.n_updates(part))) if part else None):
            digests[f"updates/{name}"] = digest_of(torch.stack([count for _, count in counts]).max())
    return digests


def _gathered(held: tuple[int, torch.Tensor] | None) -> list[tuple[int, torch.Tensor]]:
    """What every rank holds, on rank 0; nothing on the others."""
    every: list[tuple[int, torch.Tensor] | None] | None = (
        [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    )
    dist.gather_object(held, every)
    return [each for each in every or () if each]


def digest_of(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes in the order of its elements, 64 hex digits."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()
