"""How long until the last of many servers has begun what was decided? A sync to 1, 16 and 64 servers, 20 ms a call.

From the decision, Servers.bring_up, to the moment at which the last server carries out its order, in units of one call;
the median and the least of the passes. Servers and client are real HTTP over loopback, the trainer answers at once. The
first sync of a server requests its health, tokenizer and address before, from all servers concurrently too. For
comparison: the same orders one after another.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from prefect.logging import disable_run_logger

from rollmill.flows.policies.server_parity import Openings, ServedRun
from rollmill.flows.policies.weight_sync import WeightSync
from rollmill.tasks.rollout.environment import Message
from rollmill.tasks.rollout.environments.addition import Addition
from rollmill.tasks.serve.config import ServeConfig
from rollmill.tasks.serve.policy_version import PolicyVersion
from rollmill.tasks.serve.server_pool import ServerPool
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.sync.transfer_plan import TransferPlan, lay_out_tensors, share_evenly
from rollmill.tasks.sync.weight_messages import (
    ProcessLocation,
    SendResult,
    SendTarget,
    WeightOffer,
    WeightUpdateRequest,
    encode_plan,
)
from tests.stubs.toy_settings import toy_config
from tests.stubs.trainer import LOGPROB

COUNTS, PASSES, DELAY_S, TARGET = (1, 16, 64), 9, 0.02, 1.5
ROW = ("calls", "least_calls", "first_calls", "one_by_one")
TENSORS = lay_out_tensors([("norm", (4,), "float32")])
PLAN = TransferPlan(TENSORS, share_evenly(TENSORS, 1))
OFFER = WeightOffer(PLAN, "127.0.0.1", 1, ProcessLocation("elsewhere", "cpu"))


class Trainer:
    """Answers at once, and sends nothing."""

    async def offer(self) -> WeightOffer:
        return OFFER

    async def do(self, _command: object) -> dict[str, str]:
        return {}

    async def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        return [[LOGPROB] * (len(each) - 1) for each in sequences]

    async def send(self, targets: Sequence[SendTarget], report: Any, every_s: float) -> list[SendResult]:
        return [SendResult(each.server, 0, 0.0) for each in targets]


class Bytes:
    """The stub servers' tokenizer."""

    has_template = False

    def encode(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Any:
        return np.frombuffer("".join(each.content for each in messages).encode(), np.uint8).astype(np.int32)


@dataclass(frozen=True)
class Service:
    """What is seen of a server's service."""

    client: VllmClient
    name: str


@dataclass(frozen=True)
class StubServers:
    """Stub servers in one separate process."""

    process: subprocess.Popen[str]
    urls: list[str] = field(default_factory=list)

    def started_ns(self) -> list[int]:
        """When each began its last order."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return list(json.loads(self.process.stdout.readline()))


@contextmanager
def serve(n: int) -> Iterator[StubServers]:
    command = [sys.executable, "-m", "tests.stubs.control_server", str(n), str(DELAY_S)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        ports = json.loads(process.stdout.readline())
        yield StubServers(process, [f"http://127.0.0.1:{port}" for port in ports])
        process.stdin.close()


def run_of(folder: str) -> ServedRun:
    tokenizer: Any = Bytes()
    openings = Openings(Addition(), tokenizer, max_tokens=256, timeout_s=10.0)
    return ServedRun("ab", RunFolder(folder), toy_config(), ServerPool(), openings)


async def ours(stubs: StubServers, n_passes: int) -> list[float]:
    """Calls until the last start, at the first sync and at each later one."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(VllmClient(url, ServeConfig())) for url in stubs.urls]
        run = run_of(stack.enter_context(tempfile.TemporaryDirectory()))
        trainer: Any = Trainer()
        services: Any = [Service(each, each.url) for each in clients]
        servers = WeightSync(run, trainer, services)
        calls = []
        for number in range(1 + n_passes):
            await asyncio.sleep(0.1)  # as long as connections are kept, and a step lasts longer than a call
            await servers.note_servers_before(PolicyVersion("ab", 1, number))  # as while the trainer trains
            decided_ns = time.time_ns()
            await servers.update(PolicyVersion("ab", 1, number))
            assert not servers.failed, servers.failed
            calls.append(1e-9 * (max(stubs.started_ns()) - decided_ns) / DELAY_S)
        return calls


async def one_by_one(stubs: StubServers, n_passes: int) -> float:
    """Calls until the last start when each order is awaited before the next."""
    plan = encode_plan(OFFER.plan)
    request = msgspec.json.encode(WeightUpdateRequest("ab:1:0", "keep", "tcp", plan, 60.0, 60.0))
    calls = []
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(VllmClient(url, ServeConfig())) for url in stubs.urls]
        for _ in range(1 + n_passes):
            decided_ns = time.time_ns()
            for client in clients:
                await client.update_weights(request, 60.0)
            calls.append(1e-9 * (max(stubs.started_ns()) - decided_ns) / DELAY_S)
    return statistics.median(calls[1:])


def measure(n: int, n_passes: int) -> dict[str, float]:
    """Figures of so many servers."""
    with serve(n) as stubs:
        first, *later = asyncio.run(ours(stubs, n_passes))
        return {
            f"calls_{n}": statistics.median(later),
            f"least_calls_{n}": min(later),
            f"first_calls_{n}": first,
            f"one_by_one_{n}": asyncio.run(one_by_one(stubs, n_passes)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=PASSES, help="syncs after the first")
    n_passes = parser.parse_args().passes
    figures: dict[str, float] = {}
    print(f"from decision to last start, in calls of {1e3 * DELAY_S:g} ms")
    print(f"{'servers':>8}{'ours':>10}{'least':>10}{'first sync':>12}{'one by one':>12}")
    with disable_run_logger():
        for n in COUNTS:
            figures |= measure(n, n_passes)
            values = (figures[f"{name}_{n}"] for name in ROW)
            print("{:8}{:10.2f}{:10.2f}{:12.2f}{:12.2f}".format(n, *values))
    found = figures["calls_64"]
    print(f"calls_64: {found:.2f}, target {TARGET:g}: {'reached' if found <= TARGET else 'MISSED'}")
    print(json.dumps({"benchmark": "submission", "passes": n_passes} | figures))


if __name__ == "__main__":
    main()
