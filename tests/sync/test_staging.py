"""Staging memory is a ring: its size, what arrives through it, and servers that are slower than the others."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rollmill.tasks.sync.bucket_writer import STAGING_BUCKETS
from rollmill.tasks.sync.server_transfer import BackPressure, TimeLimit
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
# 1 MiB: 64 buckets.
WEIGHTS = weights_of(0, [((1 << 16,), torch.float32)] * 4)


def test_staging_keeps_a_few_buckets_whatever_the_size_of_the_weights() -> None:
    trainer = Trainer()
    servers = [Server(trainer) for _ in range(3)]
    plan = plan_of(WEIGHTS, 1, BUCKET_BYTES, streams=2)
    assert len(plan.buckets(0)) == 16 * STAGING_BUCKETS
    for receive in (Server.open_and_receive, Server.receive):
        transfer(trainer, servers, WEIGHTS, plan, is_live=False, take=receive)
        assert trainer.senders[0]._staging["cpu"].size_bytes == STAGING_BUCKETS * BUCKET_BYTES
    for each in (*servers, trainer):
        each.close()


def test_live_weights_need_no_staging() -> None:
    trainer = Trainer()
    server = Server(trainer)
    transfer(trainer, [server], WEIGHTS, plan_of(WEIGHTS, 1, BUCKET_BYTES))
    assert trainer.senders[0]._staging["cpu"].size_bytes == 0
    for each in (server, trainer):
        each.close()


def test_a_server_that_never_opens_its_links_holds_the_others_up_for_a_limited_time() -> None:
    trainer = Trainer(straggler_timeout_s=0.5)
    absent, good = Server(trainer), Server(trainer)
    plan = plan_of(WEIGHTS, 1, BUCKET_BYTES)
    with ThreadPoolExecutor(1) as threads:
        received = threads.submit(good.open_and_receive, plan)
        pieces = pieces_of(WEIGHTS, is_live=False)
        lost, sent = trainer.senders[0].send(plan, [absent.target, good.target], pieces)
        assert_equal(received.result(TIMEOUT_S), WEIGHTS)
    assert "other servers waited 0.5 s for it; 0.0 of 1.0 MB had been sent" in lost.error
    assert sent.error == ""
    for each in (good, trainer):
        each.close()


def test_a_server_that_holds_others_up_is_given_up_before_these_miss_a_byte_for_too_long() -> None:
    trainer = Trainer(stall_timeout_s=1.0)
    absent, good = Server(trainer), Server(trainer, stall_timeout_s=1.0)
    plan = plan_of(WEIGHTS, 1, BUCKET_BYTES)
    with ThreadPoolExecutor(1) as threads:
        received = threads.submit(good.open_and_receive, plan)
        lost, sent = trainer.senders[0].send(
            plan, [absent.target, good.target], pieces_of(WEIGHTS, is_live=False)
        )
        assert_equal(received.result(TIMEOUT_S), WEIGHTS)
    assert "other servers waited 0.5 s at a time for it" in lost.error
    assert sent.error == ""
    for each in (good, trainer):
        each.close()


class Taking:
    """A transfer whose server takes its bucket after some seconds, or is given up."""

    def __init__(self, takes_after_s: float) -> None:
        self.taken_at, self.error = time.monotonic() + takes_after_s, ""

    def has_taken(self, number: int) -> bool:
        return bool(self.error) or time.monotonic() >= self.taken_at

    def give_up(self, reason: str) -> None:
        self.error = reason


@pytest.mark.parametrize(("second_s", "is_given_up"), [(1.35, False), (30.0, True)])
def test_the_time_in_which_all_servers_are_slow_is_not_held_against_one(
    second_s: float, is_given_up: bool
) -> None:
    pressure = BackPressure(TimeLimit(time.monotonic() + 60.0, "too long"), 30.0, longest_wait_s=1.0)
    first, second = Taking(1.3), Taking(second_s)
    ended = threading.Event()

    def wake() -> None:
        while not ended.wait(0.01):
            pressure.notify()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(wake)
        try:
            assert pressure.await_taken({"first": first, "second": second}, [0]) == 0
        finally:
            ended.set()
    assert bool(second.error) == is_given_up


def test_a_server_that_stalls_is_given_up_and_the_others_are_served() -> None:
    trainer = Trainer(stall_timeout_s=1.0)
    stuck, good = Server(trainer), Server(trainer)
    # 64 MiB: more than what a connection and the ring hold.
    weights = weights_of(1, [((1 << 22,), torch.float32)] * 4)
    plan = plan_of(weights, 1, 1 << 21)
    with ThreadPoolExecutor(2) as threads:
        opened = threads.submit(stuck.open, plan)
        received = threads.submit(good.open_and_receive, plan)
        pieces = pieces_of(weights, is_live=False)
        lost, sent = trainer.senders[0].send(plan, [stuck.target, good.target], pieces)
        opened.result(TIMEOUT_S)
        assert_equal(received.result(TIMEOUT_S), weights)
    assert "other servers waited 0.5 s at a time for it" in lost.error
    assert sent.error == ""
    for each in (stuck, good, trainer):
        each.close()


def test_a_single_server_that_never_opens_its_links_ends_the_transfer_at_its_time_limit() -> None:
    trainer = Trainer(timeout_s=0.5, straggler_timeout_s=0.1)
    absent = Server(trainer)
    plan = plan_of(WEIGHTS, 1, BUCKET_BYTES)
    (lost,) = trainer.senders[0].send(plan, [absent.target], pieces_of(WEIGHTS, is_live=False))
    assert "(sync.timeout_s)" in lost.error
    trainer.close()
