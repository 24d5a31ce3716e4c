"""Digests of weights and moments: equal if and only if they are, byte for byte, on any number of ranks and ZeRO stage."""

import hashlib
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from rollmill.tasks.train.checkpoints.hf_export import gather_weights
from rollmill.tasks.train.engine.deepspeed_engine import Engine
from rollmill.tasks.train.engine.optimizer_state import KINDS
from rollmill.tasks.train.rank_messages import gather_messages


def tensor_digests(engine: Engine) -> dict[str, str]:
    """Return the SHA-256, 64 hex digits, of weights, moments and update counts, by name; a collective, complete on rank 0.

    "weights/NAME" are the weights under the names of a Hugging Face checkpoint, in the type that the model computes
    with; "weight/NAME", "exp_avg/NAME" and "exp_avg_sq/NAME" are what the optimizer keeps of a parameter, in single
    precision, and "updates/NAME" is its number of updates.
    """
    digests = {f"weights/{name}": hash_tensor(each) for name, each in gather_weights(engine.model)}
    state, rank = engine.state, dist.get_rank()
    parts = {part.name: part for part in state.own_parts(rank, dist.get_world_size())}
    own = {name: _Held(part.start, part.size, state.n_updates(part)) for name, part in parts.items()}
    by_rank = gather_messages(own, dict[str, _Held])
    # One tensor at a time: rank 0 need not have room for the whole state.
    for name, shape in state.shapes.items():
        held = {sender: each[name] for sender, each in enumerate(by_rank) if name in each}
        for kind in KINDS:
            mine = state.tensor(kind, parts[name]).cpu() if name in parts else torch.empty(0)
            if rank:
                if len(mine):
                    dist.send(mine, 0)
            elif held:
                digests[f"{kind}/{name}"] = hash_tensor(_receive(held, mine, math.prod(shape)))
        if held:
            n_updates = max(each.n_updates for each in held.values())
            digests[f"updates/{name}"] = hash_tensor(torch.tensor(n_updates))
    return digests


class _Held(NamedTuple):
    """Range of a flattened parameter that a rank holds: index of its first number, how many they are, and its number of updates."""

    start: int
    size: int
    n_updates: int


def _receive(held: Mapping[int, _Held], mine: torch.Tensor, size: int) -> torch.Tensor:
    """Put the ranges of one parameter together on rank 0: [size] float32, of which the other ranks send theirs.

    Args:
        held: range of each rank that has one.
        mine: the numbers of rank 0.
        size: how many numbers the parameter has.
    """
    whole = torch.empty(size)
    for rank, each in sorted(held.items()):
        part = whole.narrow(0, each.start, each.size)
        if rank == 0:
            part.copy_(mine)
        elif each.size:
            dist.recv(part, rank)
    return whole


def hash_tensor(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes in the order of its elements, 64 hex digits."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()
