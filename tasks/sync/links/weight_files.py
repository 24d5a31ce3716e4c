"""Weights in files: safetensors on a disk, or downloaded by HTTP, of whole tensors or of their changes.

A file of changes has, under each tensor's name, the encoded changes as uint8, and in its metadata the snapshot that they are changes of.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
from safetensors import SafetensorError, safe_open

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.byte_changes import ByteRun, apply_changes
from rollmill.tasks.sync.changed_buckets import SentCopy
from rollmill.tasks.sync.links.link import as_bytes
from rollmill.tasks.sync.transfer_plan import Bucket, TensorPlan, TransferPlan

_BASE = "base_snapshot"


def encode_weight_file(
    weights: dict[str, torch.Tensor], copy: SentCopy, plan: TransferPlan, snapshot: str, base_snapshot: str
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file of weights: their changes if `copy` is the base, else the weights.

    Args:
        weights: a rank's tensors by name, in host memory.
        copy: what the rank has written last; it has these weights afterwards.
        plan: of all weights.
        snapshot: name of these weights.
        base_snapshot: what all servers hold that read the file; empty: they hold different ones, or none.
    """
    has_base = bool(base_snapshot) and copy.has(plan, base_snapshot)
    own = [each for each in plan.tensors if each.name in weights]
    copy.begin(plan, [Bucket(((each.offset, each.offset + each.size_bytes),)) for each in own])
    changes = {
        each.name: copy.encode(number, [as_bytes(weights[each.name].contiguous())])
        for number, each in enumerate(own)
    }
    copy.finish(snapshot)
    if not has_base:
        return weights, {}
    return {name: _as_tensor(each) for name, each in changes.items()}, {_BASE: base_snapshot}


def read_weight_files(
    files: Sequence[str],
    plan: TransferPlan,
    buffer: torch.Tensor,
    *,
    held: str = "",
    timeout_s: float,
    stall_timeout_s: float,
) -> int:
    """Fill a buffer with the stream of all weights, from files that hold the plan's tensors, or their changes, by name.

    Args:
        files: paths, or addresses that begin with http:// or https://.
        plan: the tensors that the files must have, and their position in the buffer.
        buffer: uint8, at least `plan.total_bytes`, in host memory if `held` is given.
        held: the snapshot that the buffer holds; empty: none.
        timeout_s: seconds that all downloads together may take.
        stall_timeout_s: seconds within which some byte must arrive.

    Raises:
        SyncError: a file cannot be read, is of changes of another snapshot, or the tensors do not match the plan.

    Returns:
        The bytes of the tensors in the files.
    """
    # httpx limits each read, not the whole download.
    deadline = time.monotonic() + timeout_s
    awaited = {each.name: each for each in plan.tensors}
    n_bytes = 0
    for file in files:
        with _open_local(file, deadline, stall_timeout_s) as path:
            try:
                with safe_open(path, framework="pt") as tensors:
                    base = (tensors.metadata() or {}).get(_BASE, "")
                    if base and base != held:
                        raise SyncError(
                            f"{_hide_query(file)} has changes of the snapshot {base}, this server holds {held or 'none'}"
                        )
                    place = _change if base else _place
                    for name in tensors.keys():  # noqa: SIM118 - no mapping
                        tensor = tensors.get_tensor(name)
                        n_bytes += tensor.nbytes
                        place(_take(name, awaited, file), tensor, buffer, file)
            except (OSError, SafetensorError) as error:
                raise SyncError(f"{_hide_query(file)} is not a complete file of weights: {error}") from error
    if awaited:
        raise SyncError(f"{', '.join(map(_hide_query, files))}: no tensor {', '.join(sorted(awaited))}")
    return n_bytes


def _as_tensor(data: bytes) -> torch.Tensor:
    # torch.frombuffer refuses an empty buffer.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _take(name: str, awaited: dict[str, TensorPlan], file: str) -> TensorPlan:
    plan = awaited.pop(name, None)
    if plan is None:
        raise SyncError(
            f"{_hide_query(file)} has a tensor {name}, which the trainer lacks or another file has"
        )
    return plan


def _change(plan: TensorPlan, changes: torch.Tensor, buffer: torch.Tensor, file: str) -> None:
    """Apply changes to a tensor's bytes in the buffer."""
    held = buffer[plan.offset : plan.offset + plan.size_bytes]
    try:
        apply_changes(ByteRun([held.numpy()]), changes.numpy().data)
    except SyncError as error:
        raise SyncError(f"{_hide_query(file)}: {plan.name}: {error}") from error


def _place(plan: TensorPlan, tensor: torch.Tensor, buffer: torch.Tensor, file: str) -> None:
    """Copy a tensor into the buffer."""
    found = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if found != (plan.dtype, plan.shape):
        raise SyncError(
            f"{_hide_query(file)} has {plan.name} as {found}, the trainer as {(plan.dtype, plan.shape)}"
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
