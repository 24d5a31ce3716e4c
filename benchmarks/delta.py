"""What do the changes of a step take to send? Bytes, seconds and CPU, compared with the whole weights and a packed send.

A model of 58M parameters is trained for some steps at learning rates of 1e-6 and 1e-5 (benchmarks.changes.trajectory); its weights
after each step are sent from one rank to one receiver by the product's sender, links and inbox: whole, and as changes. The
packed send is one large tensor over as many gloo streams, as verl's and TRL's newer ways pack tensors; their packages are not
used, and packing is not counted. Over loopback, and over a link held to 1 Gbit/s (tc's token bucket, which needs root).
Each version is compared with the sent one by the SHA-256 of every tensor. Last, changes of 1.5B parameters are written to S3 (moto's server) and
read from there: as many as were measured at 1e-6, at random positions, of one step up or down.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.changes.trajectory import RATES, STEPS
from benchmarks.servers import TRAINER, cap_spots
from benchmarks.suite.s3_server import s3_server
from benchmarks.weights.control import Client
from benchmarks.weights.gloo_pair import SENDER, open_pair, send
from benchmarks.weights.site import LOOPBACK, START_S, Spot
from rollmill.tasks.processes.launched_process import LaunchedProcess, free_port
from rollmill.tasks.store.checkpoints.weight_snapshots import publish_rank_weights, weight_urls
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.s3.s3_files import open_objects
from rollmill.tasks.store.s3.s3_objects import s3_filesystem
from rollmill.tasks.sync.bucket_writer import Piece
from rollmill.tasks.sync.changed_buckets import SentCopy
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.sync.links.link import as_bytes, serve_store
from rollmill.tasks.sync.links.weight_files import encode_weight_file, read_weight_files
from rollmill.tasks.sync.stream_memory import view_tensor
from rollmill.tasks.sync.transfer_plan import (
    BUCKET_BYTES,
    STREAMS,
    TensorPlan,
    TransferPlan,
    lay_out_tensors,
    share_evenly,
)
from rollmill.tasks.sync.weight_messages import SendTarget, WeightUpdateRequest, encode_plan
from rollmill.tasks.sync.weight_sender import WeightSender
from rollmill.tasks.train.checkpoints.tensor_digests import hash_tensor

TARGETS = {"bytes_share": 0.03, "speedup_held_link": 5.0, "update_1_5b_mb": 60.0}
PASSES, TIMEOUT_S = 3, 120.0
LARGE_TENSOR, LARGE_PARAMETERS = 25_000_000, 1_500_000_000
Figures = dict[str, float]


@dataclass
class Ends:
    """A rank that sends, in this process, and a receiver."""

    host: str
    plan: TransferPlan
    sender: WeightSender
    receiver: Client
    port: int
    pairs: list[Any]

    def __post_init__(self) -> None:
        self.prefix, self.snapshot = uuid.uuid4().hex, ""

    def whole(self, weights: torch.Tensor) -> Figures:
        """Send everything; what this costs."""
        return self._measure(lambda: self._send(weights, "", ""))

    def changes(self, weights: torch.Tensor, name: str) -> Figures:
        """Send the changes of what was sent under the last name, or everything before there is one."""
        base, self.snapshot = self.snapshot, name
        return self._measure(lambda: self._send(weights, name, base))

    def verify(self, weights: torch.Tensor) -> None:
        """Check that the receiver's tensors have the bytes of these weights; none of them is sent again."""
        tensors = self.plan.tensors
        name, base = f"{self.snapshot} verified", self.snapshot
        self.snapshot = name
        _, answer = self._send(weights, name, base, tuple(each.name for each in tensors))
        parts = ((each, weights[each.offset : each.offset + each.size_bytes]) for each in tensors)
        assert answer["checksums"] == {
            each.name: hash_tensor(view_tensor(each, data)) for each, data in parts
        }

    def packed(self, weights: torch.Tensor) -> Figures:
        """Send one large tensor, a part over each stream."""

        def work() -> tuple[float, dict[str, Any]]:
            with ThreadPoolExecutor(1 + len(self.pairs)) as threads:
                taken = threads.submit(self.receiver.call, "large", {"bytes": len(weights)})
                list(threads.map(send, self.pairs, weights.chunk(len(self.pairs))))
                taken.result()
            return len(weights), {}

        return self._measure(work)

    def _measure(self, work: Any) -> Figures:
        before = time.process_time() + self.receiver.call("cpu_s")
        started = time.perf_counter()
        n_bytes, _ = work()
        seconds = time.perf_counter() - started
        spent = time.process_time() + self.receiver.call("cpu_s") - before
        return {"bytes": n_bytes, "seconds": seconds, "cpu_s": spent}

    def _send(
        self, weights: torch.Tensor, snapshot: str, base: str, checksums: Sequence[str] = ()
    ) -> tuple[int, dict[str, Any]]:
        limits = TIMEOUT_S, TIMEOUT_S
        request = WeightUpdateRequest(
            "run:1:1",
            "keep",
            "tcp",
            encode_plan(self.plan),
            *limits,
            host=self.host,
            port=self.port,
            prefix=self.prefix,
            checksums=tuple(checksums),
            snapshot=snapshot,
            base_snapshot=base,
        )
        target = SendTarget("receiver", "tcp", self.prefix, 1, snapshot, base)
        pieces = (
            Piece(each.offset, weights[each.offset : each.offset + each.size_bytes], True)
            for each in self.plan.tensors
        )
        with ThreadPoolExecutor(1) as thread:
            taken = thread.submit(self.receiver.call, "take", msgspec.json.encode(request).decode())
            (sent,) = self.sender.send(self.plan, [target], pieces)
            answer = taken.result()
        assert (sent.error, sent.bytes) == ("", answer["bytes"]), sent
        return sent.bytes, answer


@contextmanager
def open_ends(host: str, spot: Spot, plan: TransferPlan) -> Iterator[Ends]:
    """Both ends of links between this process and a receiver at a spot."""
    port, store = free_port(), serve_store(host, TIMEOUT_S)
    config = SyncConfig(send="changes", timeout_s=TIMEOUT_S, stall_timeout_s=TIMEOUT_S)
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *spot.words,
            sys.executable,
            "-m",
            "benchmarks.weights.receiver",
            spot.address,
            str(port),
            "0",
        ]
        process = LaunchedProcess.start("receiver", words, log=Path(folder) / "log", stop_grace_s=2.0)
        sender = WeightSender(0, host, store.port, config)
        try:
            receiver = Client(spot.address, port)
            receiver.wait_until_up(START_S)
            with ThreadPoolExecutor(1) as thread:
                given = {"host": host, "port": store.port, "pairs": STREAMS}
                joined = thread.submit(receiver.call, "join", given)
                pairs = [
                    open_pair(store, f"pair/{number}", SENDER, host, TIMEOUT_S) for number in range(STREAMS)
                ]
                joined.result()
            yield Ends(host, plan, sender, receiver, store.port, pairs)
        finally:
            sender.close()
            process.stop_now()


def measure(ends: Ends, states: dict[str, list[torch.Tensor]], passes: int) -> dict[str, Figures]:
    """Median figures of each way: whole, packed, and changes at each rate."""
    first = states[RATES[0]][0]
    found: dict[str, list[Figures]] = {"whole": [], "packed": []}
    # The first pass opens links and touches memory.
    for each in range(1 + passes):
        for way, run in (("whole", ends.whole), ("packed", ends.packed)):
            figures = run(first)
            found[way] += [figures] if each else []
    for rate, versions in states.items():
        ends.changes(versions[0], f"{rate}/0")
        found[rate] = []
        for number, weights in enumerate(versions[1:], 1):
            found[rate].append(ends.changes(weights, f"{rate}/{number}"))
            ends.verify(weights)
    return {
        way: {name: median(each[name] for each in figures) for name in figures[0]}
        for way, figures in found.items()
    }


def train(folder: Path) -> tuple[TransferPlan, dict[str, list[torch.Tensor]], float]:
    """Train, and read the weights of each version at each rate; the last value is the share of changed elements at the first."""
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-m", "benchmarks.changes.trajectory", str(folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, env=environment)
    tensors = msgspec.json.decode((folder / "tensors.json").read_bytes(), type=tuple[TensorPlan, ...])
    plan = TransferPlan(tensors, share_evenly(tensors, 1), 1, BUCKET_BYTES, STREAMS)
    states = {
        rate: [
            torch.from_numpy(np.fromfile(folder / rate / f"{number}.bin", np.uint8))
            for number in range(STEPS + 1)
        ]
        for rate in RATES
    }
    versions = [each.numpy().view(np.uint16) for each in states[RATES[0]]]
    return plan, states, float(np.mean(versions[-2] != versions[-1]))


def write_large(share: float, place: str) -> Figures:
    """Write the changes of many parameters to S3, and read them back as a server does.

    Returns:
        "mb": of the file; "write_s" and "read_s": wall seconds, of one rank and one server.
    """
    random = np.random.default_rng(0)
    names = [f"w{number}" for number in range(LARGE_PARAMETERS // LARGE_TENSOR)]
    tensors = lay_out_tensors((name, (LARGE_TENSOR,), "bfloat16") for name in names)
    plan = TransferPlan(tensors, share_evenly(tensors, 1), 1, BUCKET_BYTES, STREAMS)
    values = (torch.randn(LARGE_TENSOR, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    weights, copy = {each.name: values.clone() for each in plan.tensors}, SentCopy()
    encode_weight_file(weights, copy, plan, "0", "")
    held = torch.cat([as_bytes(tensor) for tensor in weights.values()])
    for tensor in weights.values():
        items = tensor.view(torch.int16).numpy()
        positions = np.flatnonzero(random.random(len(items), dtype=np.float32) < share)
        items[positions] += random.choice([1, -1], len(positions)).astype(np.int16)
    started = time.perf_counter()
    changes, metadata = encode_weight_file(weights, copy, plan, "1", "0")
    path = publish_rank_weights(place, "1", 0, 1, lambda path: save_file(changes, path, metadata))
    written = time.perf_counter()
    limits = {"timeout_s": TIMEOUT_S, "stall_timeout_s": TIMEOUT_S}
    read_weight_files(weight_urls([path], TIMEOUT_S), plan, held, held="0", **limits)
    read = time.perf_counter()
    for each in tensors:
        if not torch.equal(held[each.offset : each.offset + each.size_bytes], as_bytes(weights[each.name])):
            raise RuntimeError(f"{each.name} differs from what was written")
    (size,) = open_objects(RunFolder(place)).keys("1/").values()
    return {"mb": size / 1e6, "write_s": written - started, "read_s": read - written}


def report(figures: dict[str, Any], by_link: dict[str, dict[str, Figures]]) -> None:
    """Print the table, the targets and the JSON object."""
    print(f"{'link':12}{'way':10}{'MB':>10}{'seconds':>10}{'CPU s':>10}")
    for link, ways in by_link.items():
        for way, each in ways.items():
            print(f"{link:12}{way:10}{each['bytes'] / 1e6:10.2f}{each['seconds']:10.3f}{each['cpu_s']:10.3f}")
    for name, target in TARGETS.items():
        value = figures[name]
        reached = value >= target if name == "speedup_held_link" else value <= target
        print(f"{name}: {value:.4g}, target {target:g}: {'reached' if reached else 'MISSED'}")
    print(json.dumps({"benchmark": "delta"} | figures | {"links": by_link}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=PASSES, help="of the whole and the packed send")
    passes = parser.parse_args().passes
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        plan, states, changed = train(Path(folder))
    with open_ends(LOOPBACK, Spot(LOOPBACK), plan) as ends:
        free = measure(ends, states, passes)
    with cap_spots(1) as spots, open_ends(TRAINER, spots[0], plan) as ends:
        held = measure(ends, states, passes)
    low, high = RATES
    with tempfile.TemporaryDirectory() as folder, s3_server():
        os.environ["ROLLMILL_SCRATCH"] = folder
        s3_filesystem().call_s3("create_bucket", Bucket="benchmark")
        large = write_large(changed, "s3://benchmark/weights")
    n_bytes = held["whole"]["bytes"]
    figures = {
        "bytes_share": held[low]["bytes"] / n_bytes,
        "bytes_share_1e_5": held[high]["bytes"] / n_bytes,
        "changed_share": changed,
        "speedup_held_link": held["whole"]["seconds"] / held[low]["seconds"],
        "speedup_held_link_1e_5": held["whole"]["seconds"] / held[high]["seconds"],
        "speedup_loopback": free["whole"]["seconds"] / free[low]["seconds"],
        "cpu_ratio": free[low]["cpu_s"] / free["whole"]["cpu_s"],
        "cpu_ratio_packed": free[low]["cpu_s"] / free["packed"]["cpu_s"],
        "update_1_5b_mb": large["mb"],
        "update_1_5b_write_s": large["write_s"],
        "update_1_5b_read_s": large["read_s"],
    }
    report(figures, {"loopback": free, "1 Gbit/s": held})


if __name__ == "__main__":
    main()
