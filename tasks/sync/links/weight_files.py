"""Reads weights from files: safetensors on a disk, or downloaded by HTTP."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
from safetensors import SafetensorError, safe_open

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.links.link import as_bytes
from rollmill.tasks.sync.transfer_plan import TensorPlan, TransferPlan


def read_weight_files(
    files: Sequence[str],
    plan: TransferPlan,
    buffer: torch.Tensor,
    *,
    timeout_s: float,
    stall_timeout_s: float,
) -> None:
    """Fill a buffer with the stream of all weights, from files that hold the plan's tensors by name.

    Args:
        files: paths, or addresses that begin with http:// or https://.
        plan: the tensors that the files must have, and their position in the buffer.
        buffer: uint8, at least `plan.total_bytes`.
        timeout_s: seconds that all downloads together may take.
        stall_timeout_s: seconds within which some byte must arrive.

    Raises:
        SyncError: a file cannot be read, or the tensors do not match the plan.
    """
    # httpx limits each read, not the whole download.
    deadline = time.monotonic() + timeout_s
    awaited = {each.name: each for each in plan.tensors}
    for file in files:
        with _open_local(file, deadline, stall_timeout_s) as path:
            try:
                with safe_open(path, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 - no mapping
                        _place(name, tensors.get_tensor(name), awaited, buffer, file)
            except (OSError, SafetensorError) as error:
                raise SyncError(f"{_hide_query(file)} is not a complete file of weights: {error}") from error
    if awaited:
        raise SyncError(f"{', '.join(map(_hide_query, files))}: no tensor {', '.join(sorted(awaited))}")


def _place(
    name: str, tensor: torch.Tensor, awaited: dict[str, TensorPlan], buffer: torch.Tensor, file: str
) -> None:
    plan = awaited.pop(name, None)
    if plan is None:
        raise SyncError(
            f"{_hide_query(file)} has a tensor {name}, which the trainer lacks or another file has"
        )
    found = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if found != (plan.dtype, plan.shape):
        raise SyncError(
            f"{_hide_query(file)} has {name} as {found}, the trainer as {(plan.dtype, plan.shape)}"
        )
    buffer[plan.offset : plan.offset + plan.size_bytes].copy_(as_bytes(tensor.contiguous()))


@contextmanager
def _open_local(file: str, deadline: float, stall_timeout_s: float) -> Iterator[str]:
    """Yield a local path of a weight file, downloaded first if it is a URL; a download is removed afterwards."""
    if not file.startswith(("http://", "https://")):
        yield file
        return
    with tempfile.TemporaryDirectory(prefix="rollmill-") as folder:
        path = Path(folder) / "weights"
        try:
            with path.open("wb") as target, httpx.stream("GET", file, timeout=stall_timeout_s) as answer:
                answer.raise_for_status()
                for part in answer.iter_bytes():
                    target.write(part)
                    if time.monotonic() > deadline:
                        raise SyncError(f"{_hide_query(file)} was not downloaded within sync.timeout_s")
        except httpx.HTTPError as error:
            # Only the type: its text would have the whole address.
            raise SyncError(f"{_hide_query(file)} cannot be read: {type(error).__name__}") from error
        yield str(path)


def _hide_query(file: str) -> str:
    # The query of a presigned address is its signature, which gives access to whoever reads the message.
    return file.partition("?")[0]
