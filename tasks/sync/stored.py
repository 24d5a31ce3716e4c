"""Weights that travel by files: safetensors on a disk, or at addresses that are read by HTTP."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors import SafetensorError, safe_open

from tasks.errors import SyncError
from tasks.sync.buckets import TensorPlan, TransferPlan
from tasks.sync.link import as_bytes


def read_stored(
    files: Sequence[str],
    plan: TransferPlan,
    buffer: torch.Tensor,
    *,
    timeout_s: float,
    stall_timeout_s: float,
) -> None:
    """Fill a buffer with the stream of all weights from files that hold the plan's tensors by name.

    Args:
        files: paths, or addresses that begin with http:// or https://.
        plan: what must be in them, and where it lies in the buffer.
        buffer: uint8, at least `plan.total_bytes`.
        timeout_s: seconds that downloads may take, all together.
        stall_timeout_s: seconds in which some byte must come.

    Raises:
        SyncError: a file cannot be read, or the tensors are not the plan's.
    """
    deadline = time.monotonic() + timeout_s
    awaited = {each.name: each for each in plan.tensors}
    for file in files:
        with _local(file, deadline, stall_timeout_s) as path:
            try:
                with safe_open(path, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 - no mapping
                        _place(name, tensors.get_tensor(name), awaited, buffer, file)
            except (OSError, SafetensorError) as error:
                raise SyncError(f"{_named(file)} is no complete file of weights: {error}") from error
    if awaited:
        raise SyncError(f"{', '.join(map(_named, files))}: no tensor {', '.join(sorted(awaited))}")


def _place(
    name: str, tensor: torch.Tensor, awaited: dict[str, TensorPlan], buffer: torch.Tensor, file: str
) -> None:
    plan = awaited.pop(name, None)
    if plan is None:
        raise SyncError(f"{_named(file)} has a tensor {name}, which the trainer has not, or a second time")
    found = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if found != (plan.dtype, plan.shape):
        raise SyncError(f"{_named(file)} has {name} as {found}, the trainer as {(plan.dtype, plan.shape)}")
    buffer[plan.offset : plan.offset + plan.size_bytes].copy_(as_bytes(tensor.contiguous()))


@contextmanager
def _local(file: str, deadline: float, stall_timeout_s: float) -> Iterator[str]:
    """A path at which a file can be mapped; a download is gone afterwards."""
    if not file.startswith(("http://", "https://")):
        yield file
        return
    with tempfile.TemporaryDirectory(prefix="rollmill-") as folder:
        path = Path(folder) / "weights"
        with path.open("wb") as target:
            _download(file, target, deadline, stall_timeout_s)
        yield str(path)


def _download(address: str, target: Any, deadline: float, stall_timeout_s: float) -> None:
    try:
        with httpx.stream("GET", address, timeout=stall_timeout_s) as answer:
            answer.raise_for_status()
            for part in answer.iter_bytes():
                target.write(part)
                if time.monotonic() > deadline:
                    raise SyncError(f"{_named(address)} was not read within the order's deadline")
    except httpx.HTTPError as error:
        raise SyncError(f"{_named(address)} cannot be read: {type(error).__name__}") from error


def _named(file: str) -> str:
    """A file as messages name it: without what signs an address."""
    return file.partition("?")[0]
