"""A rank's part of the weights as a safetensors file: whole tensors, by their names in a checkpoint."""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tasks.errors import StoreError
from tasks.store.weights import publish_part


def write_part(
    weights: Iterable[tuple[str, torch.Tensor]], place: str, name: str, rank: int, world_size: int
) -> str:
    """Write a rank's part of the weights called `name`; returns where it is. All of it is copied into memory first.

    Raises:
        StoreError: it could not be stored; names path and reason.
    """
    part = {tensor: each.to("cpu", copy=True) for tensor, each in weights}

    def write(path: Path) -> None:
        try:
            save_file(part, path)
        except (OSError, SafetensorError) as error:
            remedy = "make room, or let this user write there, or name another sync.folder"
            raise StoreError(f"cannot write weights to {path}: {error}; {remedy}") from error

    return publish_part(place, name, rank, world_size, write)
