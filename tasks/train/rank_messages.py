"""Messages that the ranks of a trainer exchange in collectives: MessagePack, decoded to a declared type.

`torch.distributed.gather_object` and its like exchange pickles, which run code of whoever joins the process group. Here a message that
is not of its type is refused.

A NumPy array travels as its dtype, shape and bytes; its type is declared with the dtype, as `npt.NDArray[np.float32]`.
"""

from collections.abc import Sequence
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from rollmill.tasks.train.collectives import times

T = TypeVar("T")

_MOST_BYTES = 2**34
"""16 GiB: every rank allocates as much as the largest message has. A billion tokens have 4 GiB of log-probabilities."""

_REMEDY = "restart the trainer; if this happens again, another program takes part in its process group: see docs/explanation/security.md"


def gather_messages(own: T, kind: type[T]) -> list[T]:
    """Gather a message of every rank on rank 0: [W] in the order of the ranks, nothing on the others. A collective.

    Without a process group, or in one of a single rank, it returns [own].

    Args:
        own: this rank's message.
        kind: its type, to which msgspec can decode.

    Raises:
        RuntimeError: a rank sent something else. The ranks may differ from now on, so it must end this one.
    """
    return _exchange(own, kind, to_all=False)


def all_gather_messages(own: T, kind: type[T]) -> list[T]:
    """Gather a message of every rank on every rank: [W] in the order of the ranks; otherwise like `gather_messages`."""
    return _exchange(own, kind, to_all=True)


def swap_messages(messages: Sequence[T], kind: type[T]) -> list[T]:
    """Send the i-th of [W] messages to rank i; returns those that all ranks send to this one, in the order of the ranks. A collective.

    Raises:
        RuntimeError: as for `gather_messages`.
    """
    encoded = [msgspec.msgpack.encode(each, enc_hook=_encode_array) for each in messages]
    sizes = torch.tensor([len(each) for each in encoded])
    incoming = torch.empty_like(sizes)
    with times.collective():
        dist.all_to_all_single(incoming, sizes)
        n_bytes = incoming.tolist()
        _check_sizes(n_bytes)
        content = torch.frombuffer(bytearray().join(encoded), dtype=torch.uint8)
        received = torch.empty(sum(n_bytes), dtype=torch.uint8)
        dist.all_to_all_single(received, content, n_bytes, sizes.tolist())
    return [_decode(each, kind, rank) for rank, each in enumerate(received.split(n_bytes))]


def _exchange(own: T, kind: type[T], *, to_all: bool) -> list[T]:
    n_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if n_ranks == 1:
        return [own]
    encoded = msgspec.msgpack.encode(own, enc_hook=_encode_array)
    # Tensors in CPU memory, which gloo exchanges; NCCL, where there is one, exchanges those on GPUs.
    sizes = list(torch.zeros(n_ranks, dtype=torch.int64).split(1))
    with times.collective():
        dist.all_gather(sizes, torch.tensor([len(encoded)]))
        n_bytes = [int(size) for size in sizes]
        _check_sizes(n_bytes)
        # A collective exchanges tensors of one size.
        padded = torch.frombuffer(bytearray(encoded.ljust(max(n_bytes), b"\0")), dtype=torch.uint8)
        is_receiver = to_all or dist.get_rank() == 0
        every = [torch.empty_like(padded) for _ in range(n_ranks)] if is_receiver else []
        if to_all:
            dist.all_gather(every, padded)
        else:
            dist.gather(padded, every or None)
    return [
        _decode(each[:size], kind, rank)
        for rank, (each, size) in enumerate(zip(every, n_bytes, strict=False))
    ]


def _check_sizes(n_bytes: Sequence[int]) -> None:
    for rank, size in enumerate(n_bytes):
        if not 0 < size <= _MOST_BYTES:
            raise RuntimeError(f"rank {rank} announces a message of {size} bytes: {_REMEDY}")


def _decode(message: torch.Tensor, kind: type[T], rank: int) -> T:
    try:
        return msgspec.msgpack.decode(message.numpy().data, type=kind, dec_hook=_decode_array)
    # Of hostile data, the nesting may be too deep.
    except (msgspec.DecodeError, RecursionError) as error:
        expected = getattr(kind, "__name__", kind)
        raise RuntimeError(f"rank {rank} sent no message of type {expected} ({error}): {_REMEDY}") from None


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} in a message between ranks")


def _decode_array(kind: Any, found: Any) -> np.ndarray:
    # kind is ndarray[shape, dtype[scalar type]].
    _, declared = get_args(kind)
    dtype = np.dtype(*get_args(declared))
    name, shape, data = found
    if name != dtype.str:
        raise ValueError(f"expected an array of {dtype.str}, got {name}")
    # Copied: an array that shares the message's memory could not be written.
    return np.frombuffer(data, dtype).reshape(shape).copy()
