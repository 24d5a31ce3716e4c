"""Weights that travel as changes, over real links in one process: who gets changes, who gets the whole.

Gloo replaces NCCL.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync import changed_buckets
from rollmill.tasks.sync.bucket_writer import Piece
from rollmill.tasks.sync.changed_buckets import ChangesPublisher, SentCopy
from rollmill.tasks.sync.transfer_plan import TransferPlan
from rollmill.tasks.sync.weight_messages import SendResult
from rollmill.tasks.sync.weight_receiver import WeightInbox
from tests.stubs.transfer_ends import (
    LARGE,
    TIMEOUT_S,
    Server,
    Trainer,
    Weights,
    assert_equal,
    pieces_of,
    plan_of,
    weights_of,
)
from tests.sync.gloo_as_nccl import GlooAsNccl

SHAPES = [
    ((300, 40), torch.bfloat16),
    ((7,), torch.float32),
    ((500, 9), torch.bfloat16),
    ((0,), torch.float16),
]


class Holder(Server):
    """A server's only worker, with the inbox that keeps what it received.

    Attributes:
        snapshot: what the flow knows that it holds.
        received_bytes: that travelled in the last transfer.
    """

    def __init__(self, trainer: Trainer, transport: str = "tcp") -> None:
        super().__init__(trainer, transport)
        self.inbox, self.snapshot, self.received_bytes = WeightInbox(0), "", 0

    def take(self, plan: TransferPlan, name: str) -> Weights:
        request = replace(self.order(plan), snapshot=name, base_snapshot=self.snapshot)
        self.snapshot = ""
        tensors, self.received_bytes = self.inbox.receive(request)
        self.snapshot = name
        return dict(tensors)

    def close(self) -> None:
        self.inbox.drop()


def sync(
    trainer: Trainer, servers: Sequence[Holder], weights: Weights, name: str, plan: TransferPlan
) -> list[list[SendResult]]:
    """One transfer to all servers, of which each must have the weights then; [W] what each rank says."""
    targets = [replace(each.target, snapshot=name, base_snapshot=each.snapshot) for each in servers]
    with ThreadPoolExecutor(len(servers) + len(trainer.senders)) as threads:
        received = [threads.submit(each.take, plan, name) for each in servers]
        sent = trainer.send(threads, weights, plan, targets)
        for each in received:
            assert_equal(each.result(TIMEOUT_S), weights)
        return [each.result(TIMEOUT_S) for each in sent]


def step(weights: Weights, seed: int, share: float = 0.02) -> Weights:
    """The weights with some elements a little larger."""
    generator = torch.Generator().manual_seed(seed)
    masks = {name: torch.rand(each.shape, generator=generator) < share for name, each in weights.items()}
    return {name: torch.where(masks[name], each * 1.01, each) for name, each in weights.items()}


@pytest.fixture
def trainer(request: pytest.FixtureRequest) -> Iterator[Trainer]:
    made = Trainer(getattr(request, "param", 1))
    yield made
    made.close()


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 99),
    n_ranks=st.integers(1, 3),
    streams=st.integers(1, 2),
    n_buckets=st.integers(1, 9),
    shares=st.lists(st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]), min_size=2, max_size=4),
)
def test_servers_that_get_changes_have_the_weights_and_so_have_those_that_come_later(
    seed, n_ranks, streams, n_buckets, shares
) -> None:
    trainer, weights = Trainer(n_ranks), weights_of(seed, SHAPES)
    n_bytes = sum(each.nbytes for each in weights.values())
    plan = plan_of(weights, n_ranks, 1 + n_bytes // n_buckets, streams)
    first, later = Holder(trainer), Holder(trainer)
    sync(trainer, [first], weights, "0", plan)
    for number, share in enumerate(shares, 1):
        weights = step(weights, number, share)
        sent = sync(trainer, [first, later] if number > 1 else [first], weights, str(number), plan)
        assert first.received_bytes == sum(each[0].bytes for each in sent)
        if share <= 0.02:
            assert first.received_bytes < n_bytes / 4
        if number == 2:
            assert later.received_bytes == n_bytes, "it holds nothing"
    for each in (first, later, trainer):
        each.close()


@pytest.mark.parametrize("trainer", [2], indirect=True)
@pytest.mark.parametrize("transport", ["tcp", "nccl"])
def test_a_server_that_missed_a_version_gets_the_whole_and_changes_after_that(
    trainer: Trainer, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", GlooAsNccl, raising=False)
    present, missing = Holder(trainer, transport), Holder(trainer, transport)
    weights = weights_of(0, SHAPES)
    plan, n_bytes = plan_of(weights, 2), sum(each.nbytes for each in weights.values())
    sync(trainer, [present, missing], weights, "0", plan)
    weights = step(weights, 1)
    sync(trainer, [present], weights, "1", plan)
    weights = step(weights, 2)
    sync(trainer, [present, missing], weights, "2", plan)
    assert (missing.received_bytes, present.received_bytes < n_bytes / 4) == (n_bytes, True)
    weights = step(weights, 3)
    sync(trainer, [present, missing], weights, "3", plan)
    assert missing.received_bytes == present.received_bytes < n_bytes / 4
    for each in (present, missing):
        each.close()


def test_the_same_weights_sent_to_one_server_again_leave_the_others_their_changes(trainer: Trainer) -> None:
    one, other = Holder(trainer), Holder(trainer)
    weights = weights_of(0, SHAPES)
    plan, n_bytes = plan_of(weights), sum(each.nbytes for each in weights.values())
    sync(trainer, [one, other], weights, "0", plan)
    sync(trainer, [one], weights, "0 again", plan)
    assert one.received_bytes < n_bytes / 20
    sync(trainer, [one, other], step(weights, 1), "1", plan)
    assert one.received_bytes == other.received_bytes < n_bytes / 4
    for each in (one, other):
        each.close()


@pytest.mark.parametrize("what", ["forgotten", "other plan", "failed"])
def test_a_trainer_that_lost_what_it_sent_sends_the_whole(trainer: Trainer, what: str) -> None:
    server, weights = Holder(trainer), weights_of(0, SHAPES)
    plan, n_bytes = plan_of(weights), sum(each.nbytes for each in weights.values())
    sync(trainer, [server], weights, "0", plan)
    if what == "forgotten":
        trainer.senders[0].forget_sent()
    elif what == "other plan":
        plan = replace(plan, bucket_bytes=2000)
        with pytest.raises(SyncError, match="changes are of the snapshot 0"):
            server.take(plan, "1")
    else:
        broken = iter(list(pieces_of(weights))[:2])
        with pytest.raises(SyncError, match="expected the stream's bytes"):
            trainer.senders[0].send(plan, [replace(Holder(trainer).target, snapshot="1")], broken)
    sync(trainer, [server], step(weights, 1), "2", plan)
    assert server.received_bytes == n_bytes
    sync(trainer, [server], step(weights, 2), "3", plan)
    assert server.received_bytes < n_bytes / 4
    server.close()


def test_a_reception_that_ends_in_the_middle_leaves_no_snapshot(trainer: Trainer) -> None:
    server, weights = Holder(trainer), weights_of(0, LARGE)
    plan = plan_of(weights, 1, 1 << 22)
    sync(trainer, [server], weights, "0", plan)
    changed = {name: each + 1 for name, each in weights.items()}

    def pieces() -> Iterator[Piece]:
        for number, piece in enumerate(pieces_of(changed)):
            if number == 1:
                server.inbox.drop()
            yield piece

    target = replace(server.target, snapshot="1", base_snapshot="0")
    with ThreadPoolExecutor(1) as thread:
        received = thread.submit(server.take, plan, "1")
        (sent,) = trainer.senders[0].send(plan, [target], pieces())
        with pytest.raises(SyncError, match=r"bucket .* of rank 0 did not arrive"):
            received.result(TIMEOUT_S)
    assert sent.error
    with pytest.raises(SyncError, match="changes are of the snapshot 1, this server holds none"):
        server.inbox.receive(replace(server.order(plan), snapshot="2", base_snapshot="1"))
    server.inbox = WeightInbox(0)
    sync(trainer, [server], changed, "2", plan)
    server.close()


def test_a_server_that_holds_other_bytes_than_it_should_refuses_the_changes(trainer: Trainer) -> None:
    server, weights = Holder(trainer), weights_of(0, SHAPES)
    plan = plan_of(weights)
    with ThreadPoolExecutor(1) as thread:
        received = thread.submit(server.take, plan, "0")
        trainer.senders[0].send(plan, [replace(server.target, snapshot="0")], pieces_of(weights))
        # Views of the buffer.
        held = received.result(TIMEOUT_S)
    held["layers.0.weight"].view(torch.uint8)[0, 7] += 1
    with pytest.raises(SyncError, match="they were other bytes before"):
        sync(trainer, [server], step(weights, 1, 0.5), "1", plan)
    server.close()


def test_changes_that_wait_for_a_slow_server_take_a_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed_buckets, "MOST_WAITING_BYTES", 3000)
    weights = weights_of(0, [((4000,), torch.bfloat16)])
    plan = plan_of(weights)
    buckets, copy = plan.buckets(0), SentCopy()
    ready: list[Future[Sequence[torch.Tensor]]] = [Future() for _ in buckets]
    parts = [each.view(torch.uint8) for each in weights["layers.0.weight"].split(500)]
    copy.begin(plan, buckets)
    for number, part in enumerate(parts):
        copy.encode(number, [part])
    copy.finish("0")
    taken = threading.Semaphore(0)

    def await_taken(waiting: tuple[int, ...]) -> int:
        assert taken.acquire(timeout=TIMEOUT_S)
        return waiting[0]

    copy.begin(plan, buckets)
    publisher = ChangesPublisher(copy, ready, await_taken)
    random = [torch.randint(0, 256, (1000,), dtype=torch.uint8) for _ in parts]
    with ThreadPoolExecutor(1) as thread:
        publishing = thread.submit(
            lambda: [publisher.publish(*each) for each in enumerate([p] for p in random)]
        )
        ready[1].result(TIMEOUT_S)
        taken.release(len(parts))
        publishing.result(TIMEOUT_S)
    assert sum(each.done() for each in ready) <= 3
    assert copy.has(plan, "0") is False, "it is being written"
    copy.finish("1")
    assert copy.has(plan, "1")
    copy.forget()
    assert copy.size_bytes == 0
