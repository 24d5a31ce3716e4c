"""Sender and receivers over real links, in one process."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.bucket_writer import Piece
from rollmill.tasks.sync.links.link import report_refusal
from rollmill.tasks.sync.links.shm_link import SharedMemory, open_shared
from rollmill.tasks.sync.transfer_plan import TransferPlan
from rollmill.tasks.sync.weight_messages import SendTarget
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
    sends,
    transfer,
    weights_of,
)

shape = st.lists(st.integers(0, 40), max_size=3).map(tuple)
dtype = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 99),
    shapes=st.lists(st.tuples(shape, dtype), max_size=8),
    n_buckets=st.integers(1, 64),
    n_ranks=st.integers(1, 3),
    streams=st.integers(1, 3),
    is_live=st.booleans(),
)
def test_received_weights_equal_the_sent_ones(seed, shapes, n_buckets, n_ranks, streams, is_live) -> None:
    weights = weights_of(seed, shapes)
    n_bytes = sum(each.nbytes for each in weights.values())
    plan = plan_of(weights, n_ranks, 1 + n_bytes // n_buckets, streams)
    trainer = Trainer(n_ranks)
    server = Server(trainer)
    sent = transfer(trainer, [server], weights, plan, is_live=is_live)
    assert sum(each.bytes for (each,) in sent) == n_bytes
    server.close()
    trainer.close()


def test_every_server_gets_the_same_weights_again_and_again() -> None:
    trainer = Trainer(n_ranks=2)
    servers = [Server(trainer) for _ in range(3)]
    for seed in range(3):
        weights = weights_of(
            seed, [((30, 40), torch.float32), ((7,), torch.float32), ((50, 9), torch.bfloat16)]
        )
        take = Server.receive if seed else Server.open_and_receive
        transfer(trainer, servers, weights, plan_of(weights, 2), take=take)
    for each in (*servers, trainer):
        each.close()


def test_servers_of_one_machine_read_what_all_ranks_have_written() -> None:
    trainer = Trainer(n_ranks=2)
    shapes = [((30, 40), torch.float32), ((7,), torch.float32)]
    plan = plan_of(weights_of(0, shapes), 2)
    memory = SharedMemory(plan.total_bytes)
    servers = [Server(trainer, "shm"), Server(trainer, "shm"), Server(trainer, "tcp")]
    for seed in range(2):
        weights = weights_of(seed, shapes)

        def take(server: Server, plan: TransferPlan, is_first: bool = not seed) -> Weights:
            is_shared = server.target.transport == "shm"
            view = open_shared(memory.path, plan.total_bytes, is_writable=False) if is_shared else None
            return (server.open_and_receive if is_first else server.receive)(plan, view)

        transfer(trainer, servers, weights, plan, take=take, shared=memory.stream)
    memory.close()
    for each in (*servers, trainer):
        each.close()


def test_a_new_segment_at_the_path_of_an_earlier_one_is_opened() -> None:
    """A trainer that loads another model and then the first again has the same descriptor."""
    inbox, seen = WeightInbox(0), list[int]()
    first = SharedMemory(8)
    for number in (1, 2):
        memory = first if number == 1 else SharedMemory(8)
        assert memory.path == first.path
        memory.stream.fill_(number)
        order = SimpleNamespace(
            transport="shm",
            shared=memory.path,
            prefix=f"links of {number}",
            mode="keep",
            arrives_on_device=False,
        )
        seen.append(int(inbox._choose_buffer(order, 8)[0]))  # type: ignore[arg-type]
        memory.close()
    assert seen == [1, 2]


def test_shared_memory_of_another_size_or_place_is_refused() -> None:
    memory = SharedMemory(8)
    with pytest.raises(SyncError, match=r"expected 16 bytes at .*, found 8"):
        open_shared(memory.path, 16, is_writable=False)
    memory.close()
    with pytest.raises(SyncError, match=r"cannot be opened on this machine.*sync\.transport=tcp"):
        open_shared(memory.path, 8, is_writable=False)


def test_a_server_that_takes_nothing_is_given_up_and_the_others_are_served() -> None:
    trainer = Trainer(stall_timeout_s=1.0)
    stuck, good = Server(trainer), Server(trainer)
    weights = weights_of(0, LARGE)
    plan = plan_of(weights, 1, 1 << 22)
    with ThreadPoolExecutor(2) as threads:
        opened = threads.submit(stuck.open, plan)
        received = threads.submit(good.open_and_receive, plan)
        lost, sent = sends(trainer, weights, plan, [stuck, good])
        opened.result()
        assert_equal(received.result(), weights)
    assert "in 1 s (sync.stall_timeout_s)" in lost.error
    assert "of 50.3 MB had been sent" in lost.error
    assert (sent.bytes, sent.error) == (sum(each.nbytes for each in weights.values()), "")
    for each in weights.values():
        each.zero_()  # as training continues: what was given up is dead
    with pytest.raises(SyncError, match=r"bucket . of 12 of rank 0 did not arrive"):
        stuck.receive(plan)
    good.close()
    trainer.close()


def test_a_server_that_is_slower_than_the_first_by_too_much_is_given_up() -> None:
    trainer = Trainer(straggler_timeout_s=0.5)
    slow, good = Server(trainer), Server(trainer)
    weights = weights_of(0, LARGE)
    plan = plan_of(weights, 1, 1 << 22)
    with ThreadPoolExecutor(2) as threads:
        opened = threads.submit(slow.open, plan)
        received = threads.submit(good.open_and_receive, plan)
        lost, sent = sends(trainer, weights, plan, [slow, good])
        opened.result()
        received.result()
    assert "not done 0.5 s after another server" in lost.error
    assert sent.error == ""
    for each in (slow, good, trainer):
        each.close()


@pytest.mark.parametrize("is_before", [True, False])
def test_a_server_that_refuses_is_given_up_by_all_ranks_before_the_time_limit(is_before: bool) -> None:
    trainer = Trainer(n_ranks=2)
    refusing, good = Server(trainer), Server(trainer)
    weights = weights_of(0, [((10,), torch.float32)])
    plan = plan_of(weights, 2)
    with ThreadPoolExecutor(3) as threads:
        if is_before:
            report_refusal(trainer.store, refusing.target.prefix)
        received = threads.submit(good.open_and_receive, plan)
        sent = trainer.send(threads, weights, plan, [refusing.target, good.target])
        assert_equal(received.result(TIMEOUT_S), weights)
        if not is_before:
            report_refusal(trainer.store, refusing.target.prefix)
        for lost, whole in (each.result(TIMEOUT_S) for each in sent):
            assert lost.error == "the server refused the weights; 0.0 of 0.0 MB had been sent"
            assert whole.error == ""
    again = Server(trainer)
    transfer(trainer, [again], weights, plan)
    for each in (good, again, trainer):
        each.close()


@pytest.mark.slow
def test_a_server_that_never_opens_its_links_is_given_up_and_can_come_under_another_prefix() -> None:
    trainer = Trainer(timeout_s=3.0)
    weights = weights_of(0, [((10,), torch.float32)])
    plan = plan_of(weights)
    (lost,) = sends(trainer, weights, plan, [Server(trainer)])
    assert "sync.timeout_s" in lost.error
    again = Server(trainer)
    transfer(trainer, [again], weights, plan)
    for each in (again, trainer):
        each.close()


def test_a_restarted_server_needs_only_the_next_order_to_receive() -> None:
    trainer = Trainer(2)
    first, again = Server(trainer), Server(trainer)
    plan = plan_of(weights_of(0, LARGE), 2, 1 << 20, 2)

    def take(server: Server, _: TransferPlan) -> Weights:
        return dict(inboxes[server].receive(server.order(plan))[0])

    inboxes = {first: WeightInbox(0), again: WeightInbox(0)}
    for seed, server in enumerate((first, first, again)):
        transfer(trainer, [server], weights_of(seed, LARGE), plan, take=take)
        if server is first and seed:
            inboxes[first].drop()
    inboxes[again].drop()
    trainer.close()


@pytest.mark.slow
def test_a_trainer_that_sends_nothing_ends_the_reception_with_rank_bucket_and_bytes() -> None:
    trainer = Trainer()
    server = Server(trainer, stall_timeout_s=2.0)
    weights = weights_of(0, [((100,), torch.float32)])
    plan = plan_of(weights, 1, 100)
    gate: Future[None] = Future()

    def stalling() -> Iterator[Piece]:
        (piece,) = pieces_of(weights)
        yield Piece(0, piece.data[:30], True)
        gate.result(TIMEOUT_S)
        raise SyncError("the layer was not gathered")

    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(trainer.senders[0].send, plan, [server.target], stalling())
        server.open(plan)
        with pytest.raises(
            SyncError,
            match=r"bucket 2 of 4 of rank 0 did not arrive: .*; 0\.0 of its 0\.0 MB of this link had",
        ):
            server.receive(plan)
        gate.set_result(None)
        with pytest.raises(SyncError, match="not gathered"):
            sent.result(TIMEOUT_S)
    trainer.close()


def test_links_that_are_dropped_end_a_reception_and_its_sender_at_once() -> None:
    trainer = Trainer()
    server = Server(trainer)
    weights = weights_of(0, LARGE)
    plan = plan_of(weights, 1, 1 << 22)
    gate: Future[None] = Future()

    def halted() -> Iterator[Piece]:
        first, *others = pieces_of(weights)
        yield first
        gate.result(TIMEOUT_S)
        yield from others

    with ThreadPoolExecutor(2) as threads:
        sent = threads.submit(trainer.senders[0].send, plan, [server.target], halted())
        server.open(plan)
        received = threads.submit(server.receive, plan)
        while not trainer.senders[0].progress()[server.target.server]:
            with suppress(TimeoutError):
                received.exception(0.01)
        server.close()
        assert "did not arrive" in str(received.exception(TIMEOUT_S))
        gate.set_result(None)
        assert "the connection broke" in sent.result(TIMEOUT_S)[0].error


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ([], "expected the stream's bytes 0 to 16 from this rank, got none"),
        ([Piece(0, torch.zeros(3), True)], "bytes 0 to 16 from this rank, got none or not all"),
        ([Piece(4, torch.zeros(3), True)], "expected the stream's bytes from 0 on, got them from 4 on"),
    ],
)
def test_pieces_that_are_not_all_of_the_plan_end_the_transfer_on_both_sides(given, complaint: str) -> None:
    trainer = Trainer()
    server = Server(trainer)
    weights = {"w": torch.zeros(4)}
    plan = plan_of(weights)
    with ThreadPoolExecutor(1) as threads:
        received = threads.submit(server.open_and_receive, plan)
        with pytest.raises(SyncError, match=complaint):
            trainer.senders[0].send(plan, [server.target], given)
        assert isinstance(received.exception(TIMEOUT_S), SyncError)
    server.close()


def test_a_transport_without_links_is_named() -> None:
    trainer = Trainer()
    weights = {"w": torch.zeros(4)}
    with pytest.raises(SyncError, match="expected a link by tcp, nccl, shm, ipc, got 'files'"):
        trainer.senders[0].send(plan_of(weights), [SendTarget("a", "files", "p")], pieces_of(weights))
