"""Where the seconds of a transfer went: a slow receiver and a slow trainer, planted, and each booked to its cause."""

import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import torch

from rollmill.tasks.observe.spans import Recorder, Span, recording, span
from rollmill.tasks.sync.bucket_writer import Piece
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.sync.links.link import serve_store
from rollmill.tasks.sync.transfer_plan import TransferPlan, lay_out_tensors, share_evenly
from rollmill.tasks.sync.weight_messages import SendTarget, WeightUpdateRequest, encode_plan
from rollmill.tasks.sync.weight_receiver import open_links
from rollmill.tasks.sync.weight_sender import WeightSender
from tests.stubs.transfer_ends import receive_tensors

HOST, TIMEOUT_S = "127.0.0.1", 30.0
SERVER = "http://server"
SMALL, LARGE = 1 << 20, 1 << 26
"""Bytes: the kernel keeps more than the one for a socket, and less than the other."""
DELAY_S = 1.5
PLANTED_S, OTHER_S = 0.7 * DELAY_S, 0.5 * DELAY_S
"""What was planted is above the one, and what was not below the other, also where each end loses the processor."""


def seconds(spans: list[Span], name: str, cause: str = "") -> float:
    return sum(1e-9 * each.duration_ns for each in spans if (each.name, each.cause) == (name, cause))


def transfer_spans(
    n_bytes: int, *, before_links: float = 0.0, before_bytes: float = 0.0, before_piece: float = 0.0
) -> tuple:
    """Spans of the trainer and of the server, of a transfer with delays planted on either side, in seconds."""
    weights = torch.zeros(n_bytes, dtype=torch.uint8)
    tensors = lay_out_tensors([("all", (n_bytes // 4,), "float32")])
    plan = TransferPlan(tensors, share_evenly(tensors, 1), bucket_bytes=1 << 22)
    store, target = serve_store(HOST, TIMEOUT_S), SendTarget(SERVER, "tcp", uuid.uuid4().hex)
    limits = {"timeout_s": TIMEOUT_S, "stall_timeout_s": TIMEOUT_S}
    sender = WeightSender(0, HOST, store.port, SyncConfig(**limits), TIMEOUT_S)
    order = WeightUpdateRequest(
        "run:1:1",
        "keep",
        "tcp",
        encode_plan(plan),
        **limits,
        host=HOST,
        port=store.port,
        prefix=target.prefix,
    )

    def pieces() -> Iterator[Piece]:
        half = n_bytes // 2
        yield Piece(0, weights[:half], True)
        time.sleep(before_piece)
        yield Piece(half, weights[half:], True)

    def receive() -> None:
        time.sleep(before_links)
        with span("receiving"):
            links = open_links(order, plan, 0)
            time.sleep(before_bytes)
            list(receive_tensors(links, plan, torch.empty(n_bytes, dtype=torch.uint8)))
            for link in links:
                link.close()

    trainer, server = Recorder("trainer/0"), Recorder(SERVER)
    with ThreadPoolExecutor(1) as thread:
        with recording(server):
            received = thread.submit(copy_context().run, receive)
        with recording(trainer), span("sending"):
            (sent,) = sender.send(plan, [target], pieces())
        received.result(TIMEOUT_S)
    sender.close()
    assert (sent.bytes, sent.error) == (n_bytes, "")
    return trainer.take(), server.take()


def test_a_late_server_is_the_cause_of_the_trainers_wait() -> None:
    trainer, server = transfer_spans(SMALL, before_links=DELAY_S)
    began = {each.name: each.started_ns for each in [*trainer, *server]}
    late_s = 1e-9 * (began["receiving"] - began["sending"])
    assert late_s > PLANTED_S
    assert PLANTED_S < seconds(trainer, "waiting_for_receiver", SERVER) <= seconds(trainer, "sending")
    assert seconds(trainer, "gathering") < OTHER_S


def test_a_server_that_pauses_receiving_is_the_cause_of_the_trainers_wait() -> None:
    trainer, _ = transfer_spans(LARGE, before_bytes=DELAY_S)
    assert PLANTED_S < seconds(trainer, "waiting_for_receiver", SERVER) <= seconds(trainer, "sending")
    assert seconds(trainer, "gathering") < OTHER_S
    (whole,) = [each for each in trainer if each.name == "sending"]
    for each in trainer:
        assert whole.started_ns <= each.started_ns
        assert each.started_ns + each.duration_ns <= whole.started_ns + whole.duration_ns


def test_slow_gathering_is_the_trainers_and_the_cause_of_its_servers_wait() -> None:
    trainer, server = transfer_spans(SMALL, before_piece=DELAY_S)
    assert PLANTED_S < seconds(trainer, "gathering") <= seconds(trainer, "sending")
    assert PLANTED_S < seconds(server, "waiting_for_trainer", "trainer/0") <= seconds(server, "receiving")
    assert seconds(trainer, "waiting_for_receiver", SERVER) < OTHER_S
