"""Links by CUDA IPC within one process: a register of tensors replaces CUDA's handles, and host memory the GPU's."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.bucket_writer import STAGING_BUCKETS
from tests.stubs.transfer_ends import (
    TIMEOUT_S,
    Server,
    Trainer,
    assert_equal,
    pieces_of,
    plan_of,
    transfer,
    weights_of,
)

BUCKET_BYTES = 1 << 14
# 256 KiB: 16 buckets.
WEIGHTS = weights_of(0, [((1 << 14,), torch.float32)] * 4)


class Handles:
    """Exports tensors of this process and opens them, in the form of torch's functions for tensors of a GPU."""

    def __init__(self) -> None:
        self.exported: dict[bytes, torch.Tensor] = {}
        self.opened = Counter[bytes]()

    def reduce(self, tensor: torch.Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        handle = str(tensor.data_ptr()).encode()
        self.exported[handle] = tensor
        first = type(tensor), tensor.size(), tensor.stride(), tensor.storage_offset()
        storage = type(tensor._typed_storage()), tensor.dtype, 0, handle, tensor.nbytes, 0
        return self.rebuild, (*first, *storage, False, b"counter", 0, b"event", True)

    def rebuild(self, kind: Any, size: Any, stride: Any, offset: int, *storage: Any) -> torch.Tensor:
        handle = storage[3]
        self.opened[handle] += 1
        return self.exported[handle].as_strided(size, stride, offset)


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> Handles:
    handles = Handles()
    monkeypatch.setattr(reductions, "reduce_tensor", handles.reduce)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", handles.rebuild)
    return handles


@pytest.mark.parametrize("is_live", [True, False])
def test_weights_arrive_and_each_link_opens_the_ring_once(handles: Handles, is_live: bool) -> None:
    trainer = Trainer()
    servers = [Server(trainer, "ipc"), Server(trainer, "ipc"), Server(trainer, "tcp")]
    plan = plan_of(WEIGHTS, 1, BUCKET_BYTES, streams=2)
    for receive in (Server.open_and_receive, Server.receive, Server.receive):
        transfer(trainer, servers, WEIGHTS, plan, is_live=is_live, take=receive)
    ring = trainer.senders[0]._staging["exported"]
    assert ring.size_bytes == STAGING_BUCKETS * BUCKET_BYTES
    n_links = 2 * plan.streams
    assert sum(handles.opened.values()) <= n_links * (1 + STAGING_BUCKETS)
    for each in (*servers, trainer):
        each.close()


def test_memory_that_cannot_be_opened_is_noticed_when_the_links_open(
    handles: Handles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> torch.Tensor:
        raise RuntimeError("invalid device context")

    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", refuse)
    trainer = Trainer()
    stuck, good = Server(trainer, "ipc"), Server(trainer)
    plan = plan_of(WEIGHTS, 1, BUCKET_BYTES)
    with ThreadPoolExecutor(2) as threads:
        opening = threads.submit(stuck.open, plan)
        received = threads.submit(good.open_and_receive, plan)
        targets = [stuck.target, good.target]
        lost, sent = trainer.senders[0].send(plan, targets, pieces_of(WEIGHTS))
        with pytest.raises(SyncError, match="GPU memory cannot be opened: invalid device context"):
            opening.result(TIMEOUT_S)
        assert_equal(received.result(TIMEOUT_S), WEIGHTS)
    assert "the connection broke" in lost.error
    assert sent.error == ""
    for each in (good, trainer):
        each.close()


def test_memory_of_a_cpu_cannot_be_exported() -> None:
    trainer = Trainer()
    server = Server(trainer, "ipc")
    plan = plan_of(WEIGHTS, 1, BUCKET_BYTES)
    with ThreadPoolExecutor(1) as threads:
        opening = threads.submit(server.open, plan)
        (lost,) = trainer.senders[0].send(plan, [server.target], pieces_of(WEIGHTS))
        with pytest.raises(SyncError, match="the connection broke"):
            opening.result(TIMEOUT_S)
    assert "the trainer's GPU memory cannot be shared" in lost.error
    trainer.close()
