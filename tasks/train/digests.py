"""Digests of all that a version is: equal exactly when weights and moments are, byte for byte."""

import hashlib

import torch
import torch.distributed as dist

from tasks.train.engine import Engine
from tasks.train.weights import named_weights


def tensor_digests(engine: Engine) -> dict[str, str]:
    """SHA-256 of every tensor, 64 hex digits, by name; a collective, whose result counts on rank 0.

    "weights/NAME" are the weights as a checkpoint of Hugging Face names them; "rank R/KIND/N" is what rank R's
    optimizer keeps of its N-th parameter, or part of one: the parameter itself, its moments and its count of updates.
    """
    weights = {f"weights/{name}": _digest(each) for name, each in named_weights(engine.model)}
    own = {f"rank {dist.get_rank()}/{name}": _digest(each) for name, each in engine.optimizer_tensors()}
    every: list[dict[str, str]] | None = [own] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, every)
    for each in every or []:
        weights |= each
    return weights


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()
