"""Digests of weights and moments: equal if and only if they are, byte for byte, on any number of ranks and ZeRO stage."""

import hashlib

import torch
import torch.distributed as dist

from rollmill.tasks.train.checkpoints.hf_export import gather_weights
from rollmill.tasks.train.collectives import times
from rollmill.tasks.train.engine.deepspeed_engine import Engine
from rollmill.tasks.train.engine.optimizer_state import KINDS


def tensor_digests(engine: Engine) -> dict[str, str]:
    """Return the SHA-256, 64 hex digits, of weights, moments and update counts, by name; a collective, complete on rank 0.

    "weights/NAME" are the weights under the names of a Hugging Face checkpoint, in the type that the model computes
    with; "weight/NAME", "exp_avg/NAME" and "exp_avg_sq/NAME" are what the optimizer keeps of a parameter, in single
    precision, and "updates/NAME" is its number of updates.
    """
    digests = {f"weights/{name}": hash_tensor(each) for name, each in gather_weights(engine.model)}
    state, rank = engine.state, dist.get_rank()
    parts = {part.name: part for part in state.own_parts(rank, dist.get_world_size())}
    # One tensor at a time: rank 0 need not have room for the whole state.
    for name in state.shapes:
        part = parts.get(name)
        for kind in KINDS:
            held = (part.start, state.tensor(kind, part).cpu()) if part else None
            if ranges := _gather_ranges(held):
                whole = torch.cat([numbers for _, numbers in sorted(ranges, key=lambda each: each[0])])
                digests[f"{kind}/{name}"] = hash_tensor(whole)
        if counts := _gather_ranges((0, torch.tensor(state.n_updates(part))) if part else None):
            digests[f"updates/{name}"] = hash_tensor(torch.stack([count for _, count in counts]).max())
    return digests


def _gather_ranges(held: tuple[int, torch.Tensor] | None) -> list[tuple[int, torch.Tensor]]:
    """Gather (start, numbers) of one parameter from all ranks on rank 0, and nothing on the others; a collective.

    Args:
        held: this rank's range; None if it has none.
    """
    every: list[tuple[int, torch.Tensor] | None] | None = (
        [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    )
    with times.collective():
        dist.gather_object(held, every)
    return [each for each in every or () if each]


def hash_tensor(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes in the order of its elements, 64 hex digits."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()
