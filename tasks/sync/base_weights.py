"""The start model's weights to which a server adds adapters at each sync, kept where they are quickest to merge."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from rollmill.tasks.sync.adapters import list_weight_files, read_weights

BasePlace = Literal["device", "host", "files"]

SPARE_BYTES = 4 << 30
"""Memory of a GPU that stays free next to the start model's weights."""


def choose_base_place(size_bytes: int, *, gpu_bytes: int, host_bytes: int) -> BasePlace:
    """Choose where the start model's weights are kept between syncs, for a model on a GPU.

    "device": on the GPU, if SPARE_BYTES stay free; else "host": page-locked host memory, if as much again stays free; else
    "files": they are read at each sync.

    Args:
        size_bytes: of the weights.
        gpu_bytes: free memory of the GPU that no other process will take; 0 if the trainer may use it.
        host_bytes: free memory of the machine for this process.
    """
    if size_bytes + SPARE_BYTES <= gpu_bytes:
        return "device"
    return "host" if 2 * size_bytes <= host_bytes else "files"


def measure_place(folder: str, device: torch.device, n_workers: int, *, is_alone: bool) -> BasePlace:
    """Choose where a start model's weights are kept, by what is free now.

    Args:
        folder: of the start model.
        device: of the model that the weights are loaded into.
        n_workers: workers of this machine that each keep the weights.
        is_alone: True if the trainer uses another GPU.
    """
    # On a CPU mapped files are host memory that the kernel may take back.
    if device.type != "cuda":
        return "files"
    size = sum(each.stat().st_size for each in list_weight_files(folder))
    return choose_base_place(
        size,
        gpu_bytes=torch.cuda.mem_get_info(device)[0] if is_alone else 0,
        host_bytes=free_host_bytes() // n_workers,
    )


def free_host_bytes() -> int:
    """Return the memory that processes of this machine can still take, in bytes, by Linux's estimate."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10


class BaseWeights:
    """The weights of a model folder, in the precision in which they are stored.

    Args:
        folder: the model folder; read once, unless `place` is "files".
        device: on which `read` yields the weights.
        place: where they are kept.
    """

    def __init__(self, folder: str, device: torch.device, place: BasePlace) -> None:
        self.folder = folder
        self._device, self._place = device, place
        self._kept: list[tuple[str, torch.Tensor]] = []

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, weight) of each weight, on the device."""
        if self._place != "files" and not self._kept:
            self._kept = [(name, self._keep(each)) for name, each in read_weights(self.folder)]
        for name, each in self._kept or read_weights(self.folder):
            yield name, each.to(self._device, non_blocking=True)

    def _keep(self, weight: torch.Tensor) -> torch.Tensor:
        if self._place == "device":
            return weight.to(self._device, copy=True)
        is_pinned = self._device.type == "cuda"
        return torch.empty(weight.shape, dtype=weight.dtype, pin_memory=is_pinned).copy_(weight)
