"""Weights that are taken tensor by tensor while they arrive, as on a GPU; here in host memory."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.bucket_writer import Piece
from rollmill.tasks.sync.links.link import CPU
from rollmill.tasks.sync.stream_memory import WAITING_BUCKETS, ArrivingTensors
from rollmill.tasks.sync.transfer_plan import TransferPlan
from rollmill.tasks.sync.weight_receiver import stream_tensors
from tests.stubs.transfer_ends import (
    TIMEOUT_S,
    Server,
    Trainer,
    Weights,
    assert_equal,
    pieces_of,
    plan_of,
    transfer,
    weights_of,
)


def open_and_stream(server: Server, plan: TransferPlan) -> Weights:
    server.open(plan)
    return dict(stream_tensors(server.links, plan, CPU))


shape = st.lists(st.integers(0, 40), max_size=3).map(tuple)
dtype = st.sampled_from([torch.float32, torch.bfloat16])


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 99),
    shapes=st.lists(st.tuples(shape, dtype), max_size=8),
    n_buckets=st.integers(1, 64),
    n_ranks=st.integers(1, 3),
    streams=st.integers(1, 3),
)
def test_streamed_tensors_are_those_that_were_sent(seed, shapes, n_buckets, n_ranks, streams) -> None:
    weights = weights_of(seed, shapes)
    n_bytes = sum(each.nbytes for each in weights.values())
    plan = plan_of(weights, n_ranks, 1 + n_bytes // n_buckets, streams)
    trainer = Trainer(n_ranks)
    servers = [Server(trainer) for _ in range(2)]
    transfer(trainer, servers, weights, plan, is_live=False, take=open_and_stream)
    for each in (*servers, trainer):
        each.close()


def test_what_no_one_takes_stops_at_a_few_buckets() -> None:
    plan = plan_of(weights_of(0, [((10,), torch.float32)] * 100), 1, 80)
    buckets, memory = plan.buckets(0), ArrivingTensors(plan, CPU)
    filled = list[int]()

    def fill() -> None:
        for number, bucket in enumerate(buckets):
            for each in memory.views(bucket.ranges):
                each.fill_(number)
            memory.mark_arrived(bucket.ranges)
            filled.append(number)

    filling = threading.Thread(target=fill)
    filling.start()
    for number in range(100):
        name, tensor = memory.take()
        # A bucket has two tensors. The next one is begun when no more than two buckets wait.
        assert len(filled) <= number // 2 + WAITING_BUCKETS + 2
        assert name == f"layers.{number}.weight"
        assert set(tensor.view(torch.uint8).tolist()) == {number // 2}
    filling.join(TIMEOUT_S)
    assert len(filled) == len(buckets)


def test_a_sender_that_stops_is_an_error_for_the_reader_of_tensors() -> None:
    trainer = Trainer()
    server = Server(trainer)
    weights = weights_of(0, [((1000,), torch.float32)] * 3)
    plan = plan_of(weights, 1, 1000)

    opened = threading.Event()

    def broken() -> Iterator[Piece]:
        yield next(pieces_of(weights))
        opened.wait(TIMEOUT_S)
        raise SyncError("the layer was not gathered")

    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(trainer.senders[0].send, plan, [server.target], broken())
        server.open(plan)
        opened.set()
        with pytest.raises(SyncError, match=r"bucket . of 12 of rank 0 did not arrive"):
            list(stream_tensors(server.links, plan, CPU))
        with pytest.raises(SyncError, match="not gathered"):
            sent.result(TIMEOUT_S)
    trainer.close()


def test_a_taker_that_stops_ends_the_transfer() -> None:
    trainer = Trainer()
    server, other = Server(trainer), Server(trainer)
    # 16 MiB: more than what a connection holds.
    weights = weights_of(0, [((1 << 20,), torch.float32)] * 4)
    plan = plan_of(weights, 1, 1 << 18)
    with ThreadPoolExecutor(2) as threads:
        received = threads.submit(other.open_and_receive, plan)
        pieces = pieces_of(weights, is_live=False)
        sent = threads.submit(trainer.senders[0].send, plan, [server.target, other.target], pieces)
        server.open(plan)
        arriving = stream_tensors(server.links, plan, CPU)
        next(arriving)
        arriving.close()
        lost, whole = sent.result(TIMEOUT_S)
        assert_equal(received.result(TIMEOUT_S), weights)
    assert "the connection broke" in lost.error
    assert whole.error == ""
    for each in (other, trainer):
        each.close()
