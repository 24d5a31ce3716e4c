"""A link by NCCL over a stand-in for torch's process group, whose CPU build has none; the link itself needs two GPUs."""

import os
import queue
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
from torch._C._distributed_c10d import Backend

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.sync.links.link import Rendezvous, join_store, link_name, serve_store
from rollmill.tasks.sync.links.nccl_link import ERROR_HANDLING, NcclReceiver, NcclSender, set_timeout
from rollmill.tasks.sync.transfer_plan import TransferPlan, lay_out_tensors, share_evenly
from rollmill.tasks.sync.weight_messages import SendTarget
from rollmill.tasks.sync.weight_sender import WeightSender

HOST = "127.0.0.1"
CPU = torch.device("cpu")


class Work:
    """What a process group returns: `wait` raises when the other end does not come in time, or the group is aborted."""

    def __init__(self, group: "StandInGroup", call: str, data: torch.Tensor) -> None:
        self._group, self._call, self._data = group, call, data

    def wait(self, limit: timedelta) -> None:
        if self._call == "send":
            self._group.pipe.put(self._data.clone())
            return
        try:
            self._data.copy_(self._group.pipe.get(timeout=limit.total_seconds()))
        except queue.Empty:
            raise RuntimeError("watchdog: it timed out") from None
        if self._group.is_aborted.is_set():
            raise RuntimeError("it was aborted")


class StandInGroup:
    """A pair of ranks that meets through its store and has the device of the call that connects it."""

    made: ClassVar[list["StandInGroup"]] = []

    class Options(Backend.Options):
        def __init__(self) -> None:
            super().__init__("nccl")

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self._store, self._rank = store, rank
        self.limit, self.handling = options._timeout, os.environ[ERROR_HANDLING]
        self.is_aborted, self.device = threading.Event(), CPU
        self.pipe: queue.Queue[torch.Tensor] = queue.Queue()
        self.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.device = device
        if self._rank == 0:
            self._store.set("pipe", str(id(self.pipe)))
            self._store.wait(["connected"], self.limit)
            return
        self._store.wait(["pipe"], self.limit)
        number = int(self._store.get("pipe"))
        (self.pipe,) = (each.pipe for each in self.made if id(each.pipe) == number)
        self._store.set("connected", "")

    def send(self, tensors: Sequence[torch.Tensor], *_: int) -> Work:
        return Work(self, "send", tensors[0])

    def recv(self, tensors: Sequence[torch.Tensor], *_: int) -> Work:
        return Work(self, "recv", tensors[0])

    def abort(self) -> None:
        self.is_aborted.set()
        self.pipe.put(torch.zeros(1, dtype=torch.uint8))


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[StandInGroup]:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", StandInGroup, raising=False)
    StandInGroup.made.clear()
    return StandInGroup.made


@pytest.fixture
def store() -> Any:
    return serve_store(HOST, 10.0)


def ends(
    store: Any, devices: tuple[torch.device, torch.device] = (CPU, CPU), stall_s: float = 10.0
) -> tuple[NcclSender, NcclReceiver]:
    """Both ends of an open link."""
    joined = join_store(HOST, store.port, 10.0)
    sender = NcclSender(Rendezvous(store, "link", HOST, 10.0, stall_s, devices[0]))
    receiver = NcclReceiver(Rendezvous(joined, "link", HOST, 10.0, stall_s, devices[1]))
    opening = threading.Thread(target=sender.open)
    opening.start()
    receiver.open()
    opening.join()
    return sender, receiver


def test_each_end_connects_its_own_device_and_no_watchdog_ends_the_process(
    groups: list[StandInGroup], store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ERROR_HANDLING, "3")
    devices = torch.device("cuda", 3), torch.device("cuda", 1)
    ends(store, devices)
    assert {group.device for group in groups} == set(devices)
    assert {group.handling for group in groups} == {"0"}
    assert {group.limit for group in groups} == {timedelta(seconds=10)}
    assert os.environ[ERROR_HANDLING] == "3"


def test_a_rank_opens_the_links_of_all_servers_on_its_own_device(
    groups: list[StandInGroup], store: Any
) -> None:
    device = torch.device("cuda", 3)
    sender = WeightSender(
        0, HOST, store.port, SyncConfig(timeout_s=10.0, stall_timeout_s=10.0), device=device
    )
    tensors = lay_out_tensors([("w", (4,), "float32")])
    plan = TransferPlan(tensors, share_evenly(tensors, 1))
    links = sender._links_to(SendTarget("http://a", "nccl", "prefix", 2), plan.streams)
    others = [
        NcclReceiver(
            Rendezvous(
                join_store(HOST, store.port, 10.0), link_name("prefix", 0, worker, 0), HOST, 10.0, 10.0
            )
        )
        for worker in range(2)
    ]
    threads = [threading.Thread(target=each.open) for each in [*links, *others]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(str(group.device) for group in groups) == ["cpu", "cpu", "cuda:3", "cuda:3"]


def test_buckets_arrive_in_order_and_in_parts(groups: list[StandInGroup], store: Any) -> None:
    sender, receiver = ends(store)
    sent = [torch.arange(start, start + 6, dtype=torch.uint8) for start in (0, 6)]
    for each in sent:
        sender.send(each.split([2, 4]))
    for each in sent:
        arrived = torch.zeros(6, dtype=torch.uint8)
        receiver.receive(arrived.split([5, 1]))
        assert torch.equal(arrived, each)


def test_a_silent_end_is_an_error_after_the_stall_limit(groups: list[StandInGroup], store: Any) -> None:
    _, receiver = ends(store, stall_s=0.1)
    with pytest.raises(SyncError, match="recv of 4 bytes by NCCL failed: watchdog"):
        receiver.receive([torch.zeros(4, dtype=torch.uint8)])


def test_closing_a_link_ends_a_call_in_another_thread(groups: list[StandInGroup], store: Any) -> None:
    _, receiver = ends(store)
    errors: list[str] = []

    def receive() -> None:
        with pytest.raises(SyncError) as caught:
            receiver.receive([torch.zeros(1, dtype=torch.uint8)])
        errors.append(str(caught.value))

    thread = threading.Thread(target=receive)
    thread.start()
    receiver.close()
    thread.join(timeout=60)
    assert errors
    with pytest.raises(SyncError, match="the link is closed"):
        receiver.receive([torch.zeros(1, dtype=torch.uint8)])


def test_a_missing_end_of_a_link_is_named(groups: list[StandInGroup], store: Any) -> None:
    sender = NcclSender(Rendezvous(store, "link", HOST, 0.2, 0.2))
    with pytest.raises(SyncError, match=r"the other end of link did not come in 0\.2 s \(sync\.timeout_s\)"):
        sender.open()


def test_a_torch_without_nccl_is_named_with_a_remedy(store: Any) -> None:
    with pytest.raises(SyncError, match=r"this torch has no NCCL: set sync\.transport=tcp"):
        NcclSender(Rendezvous(store, "link", HOST, 1.0, 1.0)).open()


def test_a_groups_time_limit_is_set_by_the_installed_torch() -> None:
    options = Backend.Options("nccl")
    set_timeout(options, timedelta(seconds=3))
    assert options._timeout == timedelta(seconds=3)


def test_a_torch_without_the_private_time_limit_is_named_with_a_remedy() -> None:
    expected = rf"torch {torch.__version__.split('+')[0]}.* has no .*_timeout, which 2.13 has: set sync.transport=tcp"
    with pytest.raises(SyncError, match=expected):
        set_timeout(object(), timedelta(seconds=3))
