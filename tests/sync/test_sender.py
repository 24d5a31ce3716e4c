"""Sender and receiver over real gloo links, in one process."""

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.errors import SyncError
from tasks.sync.buckets import TransferPlan
from tasks.sync.link import RECEIVER, join_store, open_link
from tasks.sync.receiver import arriving
from tasks.sync.sender import WeightSender

HOST = "127.0.0.1"
TIMEOUT_S = 20.0


class Weight(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def receiver(sender: WeightSender, server: str, timeout_s: float = TIMEOUT_S) -> Any:
    """A link that `server` has opened, the sender being joined to it."""
    prefix = uuid.uuid4().hex
    with ThreadPoolExecutor(1) as thread:
        joined = thread.submit(sender.connect, server, prefix)
        meeting = sender.rendezvous()
        link = open_link(
            join_store(meeting["host"], meeting["port"], timeout_s), prefix, RECEIVER, HOST, timeout_s
        )
        joined.result()
    return link


def receive(link: Any, plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    known = TransferPlan.from_json(**plan)
    return dict(arriving(link, known, torch.empty(known.total_bytes, dtype=torch.uint8)))


def weights_of(seed: int, shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layers.{n}.weight": torch.randn(shape, generator=generator).to(dtype)
        for n, (shape, dtype) in enumerate(shapes)
    }


def metas(weights: dict[str, torch.Tensor]) -> list[Weight]:
    return [Weight(name, tuple(each.shape), each.dtype) for name, each in weights.items()]


shape = st.lists(st.integers(0, 40), max_size=3).map(tuple)
dtype = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 99), st.lists(st.tuples(shape, dtype), max_size=8), st.integers(1, 64))
def test_what_arrives_is_what_was_sent(seed, shapes, n_buckets) -> None:
    n_bytes = sum(torch.Size(each).numel() * dtype.itemsize for each, dtype in shapes)
    sender = WeightSender(HOST, 1 + n_bytes // n_buckets, TIMEOUT_S)
    link = receiver(sender, "a")
    weights = weights_of(seed, shapes)
    plan = sender.plan(metas(weights))
    with ThreadPoolExecutor(1) as thread:
        received = thread.submit(receive, link, plan)
        stats = sender.send(["a"], weights.items())
        found = received.result(TIMEOUT_S)
    assert list(found) == list(weights)
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert stats["bytes"] == plan["total_bytes"]


def test_every_server_gets_the_same_weights_at_once() -> None:
    sender = WeightSender(HOST, 1000, TIMEOUT_S)
    links = [receiver(sender, name) for name in ("a", "b", "c")]
    weights = weights_of(1, [((30, 40), torch.float32), ((7,), torch.float32)])
    plan = sender.plan(metas(weights))
    with ThreadPoolExecutor(3) as threads:
        received = [threads.submit(receive, link, plan) for link in links]
        sender.send(["a", "b", "c"], weights.items())
    for each in received:
        assert all(torch.equal(each.result()[name], weights[name]) for name in weights)


def test_weights_that_change_between_sends_arrive_anew() -> None:
    sender = WeightSender(HOST, 1000, TIMEOUT_S)
    link = receiver(sender, "a")
    for seed in range(3):
        weights = weights_of(seed, [((50, 9), torch.float32)])
        plan = sender.plan(metas(weights))
        with ThreadPoolExecutor(1) as thread:
            received = thread.submit(receive, link, plan)
            sender.send(["a"], weights.items())
        assert torch.equal(received.result()["layers.0.weight"], weights["layers.0.weight"])


def test_a_server_that_never_joins_is_named_when_the_timeout_is_over() -> None:
    sender = WeightSender(HOST, 1000, timeout_s=1.0)
    started = time.monotonic()
    with pytest.raises(SyncError, match="server http://gone did not join within 1 s"):
        sender.connect("http://gone", "prefix")
    assert time.monotonic() - started < 15


def test_a_server_that_stops_receiving_is_named_and_has_to_join_again() -> None:
    sender = WeightSender(HOST, 1 << 22, timeout_s=2.0)
    link = receiver(sender, "http://stuck", timeout_s=2.0)
    weights = weights_of(0, [((1 << 21,), torch.float32)] * 3)
    sender.plan(metas(weights))
    with pytest.raises(SyncError, match="http://stuck"):
        sender.send(["http://stuck"], weights.items())
    del link
    with pytest.raises(SyncError, match="have not joined: http://stuck"):
        sender.send(["http://stuck"], weights.items())
    again = receiver(sender, "http://stuck", timeout_s=20.0)
    plan = sender.plan(metas(weights))
    with ThreadPoolExecutor(1) as thread:
        received = thread.submit(receive, again, plan)
        sender.send(["http://stuck"], weights.items())
    assert torch.equal(received.result()["layers.2.weight"], weights["layers.2.weight"])


def test_a_sender_that_stops_sending_ends_the_receiver() -> None:
    sender = WeightSender(HOST, 100, TIMEOUT_S)
    link = receiver(sender, "a", timeout_s=1.0)
    plan = sender.plan([Weight("w", (100,), torch.float32)])
    with pytest.raises(SyncError, match="bucket 0 of 4 did not arrive"):
        receive(link, plan)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ([("other", torch.zeros(4))], "expected w of 16 bytes, got other of 16"),
        ([("w", torch.zeros(5))], "expected w of 16 bytes, got w of 20"),
        ([], "got none for w"),
        ([("w", torch.zeros(4)), ("v", torch.zeros(1))], "the 1 tensors of the plan, got more"),
    ],
)
def test_tensors_that_are_not_those_of_the_plan_are_refused(given, complaint: str) -> None:
    sender = WeightSender(HOST, 1000, TIMEOUT_S)
    link = receiver(sender, "a")
    plan = sender.plan([Weight("w", (4,), torch.float32)])
    with ThreadPoolExecutor(1) as thread:
        received = thread.submit(receive, link, plan)
        with pytest.raises(SyncError, match=complaint):
            sender.send(["a"], given)
        received.exception(TIMEOUT_S)


def test_weights_are_not_sent_before_they_are_planned() -> None:
    with pytest.raises(SyncError, match="planned"):
        WeightSender(HOST, 1000, TIMEOUT_S).send([], [])
