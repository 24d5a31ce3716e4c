"""Ranks that send: `python stream_ranks.py JOB.json`; see test_weight_stream.

JOB.json is {"cases": [{"model": folder, "zero_stage", "dtype", "lora": "" | "merged" | "adapters"}], "folder"}. In each case
an engine sends after its load and again after an update; what arrives, what is written into files, and the digests are
compared with the tensors gathered one by one. With a snapshot, all but the first by tcp and by files is of changes.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.sync.links.link import ReceivingLink
from rollmill.tasks.sync.links.shm_link import open_shared
from rollmill.tasks.sync.weight_messages import SendTarget, WeightOffer, WeightUpdateRequest, encode_plan
from rollmill.tasks.sync.weight_receiver import WeightInbox, open_links
from rollmill.tasks.train.checkpoints.hf_export import gather_weights
from rollmill.tasks.train.config import LoraConfig, TrainConfig
from rollmill.tasks.train.engine.deepspeed_engine import Engine
from rollmill.tasks.train.engine.lora import select_adapters
from rollmill.tasks.train.samples import Samples
from rollmill.tasks.train.service.launch import ServiceConfig
from rollmill.tasks.train.service.ranks import Ranks, join_ranks
from rollmill.tasks.train.weight_transfer import WeightTransfer
from tests.stubs.transfer_ends import receive_tensors

TIMEOUT_S = 60.0

Tensors = dict[str, torch.Tensor]


class Receiver:
    """A server's only worker, on a thread of rank 0; its links are opened once for each transport."""

    def __init__(self, offer: WeightOffer) -> None:
        self._offer, self._plan, self._inbox = offer, offer.plan, WeightInbox(0)
        self._reader = WeightInbox(0)
        self._links: dict[str, list[ReceivingLink]] = {}

    def _order(self, transport: str, prefix: str, snapshot: str = "", base: str = "") -> WeightUpdateRequest:
        offer = self._offer
        return WeightUpdateRequest(
            "run:1:1",
            "keep",
            transport,
            encode_plan(offer.plan),
            TIMEOUT_S,
            TIMEOUT_S,
            None,
            offer.host,
            offer.port,
            prefix,
            snapshot=snapshot,
            base_snapshot=base,
        )

    def receive_changes(self, snapshot: str, base: str) -> tuple[Tensors, int]:
        tensors, n_bytes = self._inbox.receive(self._order("tcp", "changes", snapshot, base))
        return dict(tensors), n_bytes

    def receive_files(self, files: list[str], snapshot: str, base: str) -> tuple[Tensors, int]:
        order = replace(self._order("files", "", snapshot, base), files=tuple(files))
        tensors, n_bytes = self._reader.receive(order)
        return dict(tensors), n_bytes

    def receive(self, transport: str) -> Tensors:
        offer, size = self._offer, self._plan.total_bytes
        if transport not in self._links:
            self._links[transport] = open_links(self._order(transport, transport), offer.plan, 0)
        if transport == "shm":
            buffer = open_shared(offer.shared, size, is_writable=False)
        else:
            buffer = torch.empty(size, dtype=torch.uint8)
        return dict(receive_tensors(self._links[transport], self._plan, buffer))


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    ranks = join_ranks(TIMEOUT_S)
    for number, case in enumerate(job["cases"]):
        run(case, Path(job["folder"]) / str(number), ranks)
    dist.barrier()  # a rank that leaves while the other is at work may abort at its end
    dist.destroy_process_group()


def run(case: dict[str, Any], folder: Path, ranks: Ranks) -> None:
    lora = LoraConfig(rank=4, send=case["lora"]) if case["lora"] else LoraConfig()
    config = TrainConfig(
        ranks=ranks.world_size, zero_stage=case["zero_stage"], dtype=case["dtype"], lora=lora
    )
    service = ServiceConfig(train=config, sync=SyncConfig(), bucket_bytes=1 << 20, port=0, log_dir="")
    engine = Engine.load(config, case["model"], ranks.device)
    transfer = WeightTransfer(service, ranks.rank, ranks.world_size)
    transfer.prepare(engine)
    receiver = Receiver(transfer.offer()) if ranks.rank == 0 else None
    for version in range(2):
        expected = whole_tensors(engine, case["lora"])
        for transport in ("tcp", "shm"):
            check_arrival(transfer, engine, receiver, expected, transport)
        check_changes(transfer, engine, receiver, expected, version)
        check_changed_files(
            transfer, engine, receiver, folder.with_name(f"{folder.name}-changes"), expected, version
        )
        files = transfer.write(engine, str(folder), f"1-{version:06d}")
        digests = transfer.digests(engine, list(expected)[:3])
        if receiver:
            check_files(files, folder, expected)
            assert digests == {name: digest(expected[name]) for name in list(expected)[:3]}
        update(engine)
        assert any(
            not torch.equal(each, expected[name])
            for name, each in whole_tensors(engine, case["lora"]).items()
        )
    engine.close()


def check_arrival(
    transfer: WeightTransfer, engine: Engine, receiver: Receiver | None, expected: Tensors, transport: str
) -> None:
    with ThreadPoolExecutor(1) as thread:
        receiving = thread.submit(receiver.receive, transport) if receiver else None
        sent = transfer.send(engine, [SendTarget(f"server by {transport}", transport, transport)])
        if receiving:
            assert_same(receiving.result(), expected)
            n_bytes = sum(each.nbytes for each in expected.values())
            assert [(each.error, each.bytes) for each in sent] == [("", n_bytes)]


def check_changes(
    transfer: WeightTransfer, engine: Engine, receiver: Receiver | None, expected: Tensors, version: int
) -> None:
    n_bytes = sum(each.nbytes for each in expected.values())
    # Each version twice: nothing changes between the two.
    for number in (2 * version, 2 * version + 1):
        names = (str(number), str(number - 1) if number else "")
        with ThreadPoolExecutor(1) as thread:
            receiving = thread.submit(receiver.receive_changes, *names) if receiver else None
            (sent,) = transfer.send(
                engine, [SendTarget("server by changes", "tcp", "changes", 1, *names)]
            ) or [None]
            if receiving and sent:
                tensors, received = receiving.result()
                assert_same(tensors, expected)
                assert (sent.error, sent.bytes) == ("", received)
                assert (received == n_bytes) == (number == 0)
                assert received < n_bytes / 3 or number % 2 == 0


def check_changed_files(
    transfer: WeightTransfer,
    engine: Engine,
    receiver: Receiver | None,
    folder: Path,
    expected: Tensors,
    version: int,
) -> None:
    n_bytes = sum(each.nbytes for each in expected.values())
    # Each version twice: nothing changes between the two.
    for number in (2 * version, 2 * version + 1):
        names = (str(number), str(number - 1) if number else "")
        files = transfer.write(engine, str(folder), str(number), *names)
        if receiver:
            tensors, read = receiver.receive_files(files, *names)
            assert_same(tensors, expected)
            assert (read == n_bytes) == (number == 0)
            assert read < n_bytes / 3 or number % 2 == 0
        # Rank 0 has removed older files after it wrote: no rank writes the next ones before.
        dist.barrier()


def check_files(files: list[str], folder: Path, expected: Tensors) -> None:
    found: Tensors = {}
    for file in files:
        tensors = load_file(file)
        assert not found.keys() & tensors.keys()
        found |= tensors
    assert_same(found, expected)
    assert sorted(map(str, folder.rglob("*.safetensors"))) == files, "older versions are removed"


def whole_tensors(engine: Engine, lora: str) -> Tensors:
    """Gathered one by one on every rank."""
    if lora != "adapters":
        return {name: each.clone() for name, each in gather_weights(engine.model)}
    found = {}
    for name, each in select_adapters(dict(engine.model.named_parameters())).items():
        stem, kind = name.removesuffix(".weight").rsplit(".", 1)
        with deepspeed.zero.GatheredParameters([each]):
            found[f"{stem}.weight.{kind}"] = each.detach().clone()
    return found


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert found[name].dtype == each.dtype
        assert torch.equal(found[name], each), name


def digest(tensor: torch.Tensor) -> str:
    return sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def update(engine: Engine) -> None:
    """An update whose loss differs by rank."""
    tokens = np.array([2 + (dist.get_rank() * 3 + place) % 50 for place in range(12)])
    samples = Samples.from_tokens([tokens], [np.arange(12) > 0])
    forward = engine.forward(engine.packer.micro_batch(samples, [0], [""]))
    engine.backward(-forward.logprobs.mean(), is_last=True)
    assert engine.update(1e-1).updated


if __name__ == "__main__":
    main()
