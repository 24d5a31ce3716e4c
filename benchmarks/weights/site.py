"""A trainer's ranks and receivers as processes, and a sync as the flow makes one."""

import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from benchmarks.weights.control import Client
from rollmill.tasks.processes.launched_process import LaunchedProcess, free_port
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.sync.weight_messages import (
    SendResult,
    SendTarget,
    ServerLocation,
    WeightOffer,
    WeightUpdateRequest,
    WeightUpdateResponse,
    encode_plan,
)

LOOPBACK, START_S, STOP_S = "127.0.0.1", 120.0, 2.0
SYNC = SyncConfig()


@dataclass(frozen=True)
class Spot:
    """Where a receiver runs: its address, and the words with which a command is started there."""

    address: str
    words: tuple[str, ...] = ()


@dataclass
class Site:
    """A trainer and receivers.

    Attributes:
        host: the trainer's address.
    """

    host: str
    trainer: Client
    receivers: list[Client]
    ports: list[int]
    spots: Sequence[Spot]
    prefixes: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.prefixes = [uuid.uuid4().hex for _ in self.receivers]

    @property
    def n_calls(self) -> int:
        """Control calls so far."""
        return sum(each.n_calls for each in (self.trainer, *self.receivers))

    def sync(self, transport: str) -> float:
        """Send to all receivers, each time by the same transport; seconds."""
        started = time.perf_counter()
        with ThreadPoolExecutor(1 + len(self.receivers)) as threads:
            offered = threads.submit(self.trainer.call, "offer")
            placed = list(threads.map(lambda each: each.call("place"), self.receivers))
            offer = msgspec.convert(offered.result(), WeightOffer)
            targets = [
                SendTarget(prefix, transport, prefix, msgspec.convert(place, ServerLocation).workers)
                for prefix, place in zip(self.prefixes, placed, strict=True)
            ]
            sending = threads.submit(self.trainer.call, "send", [asdict(each) for each in targets])
            taken = threads.map(
                lambda each, target: each.call("take", _request(offer, target)), self.receivers, targets
            )
            for answer in taken:
                msgspec.convert(answer, WeightUpdateResponse)
            sent = [SendResult(**each) for each in sending.result()]
        seconds = time.perf_counter() - started
        assert not any(each.error for each in sent), sent
        return seconds


def _request(offer: WeightOffer, target: SendTarget) -> str:
    request = WeightUpdateRequest(
        "run:1:1",
        "keep",
        target.transport,
        encode_plan(offer.plan),
        SYNC.timeout_s,
        SYNC.stall_timeout_s,
        host=offer.host,
        port=offer.port,
        prefix=target.prefix,
        shared=offer.shared,
    )
    return msgspec.json.encode(request).decode()


@contextmanager
def run_site(
    n_ranks: int, spots: Sequence[Spot] = (Spot(LOOPBACK),), *, host: str = LOOPBACK, delay_s: float = 0.0
) -> Iterator[Site]:
    """Ranks and receivers, each answering control calls after so many seconds."""
    port, meeting, ports = free_port(), free_port(), [free_port() for _ in spots]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(name: str, words: Sequence[str]) -> None:
            process = LaunchedProcess.start(name, words, log=folder / name, stop_grace_s=STOP_S)
            stack.callback(process.stop_now)

        for rank in range(n_ranks):
            given = (host, port, delay_s, rank, n_ranks, meeting)
            start(f"rank{rank}", [sys.executable, "-m", "benchmarks.weights.rank", *map(str, given)])
        for spot, each in zip(spots, ports, strict=True):
            module = [sys.executable, "-m", "benchmarks.weights.receiver"]
            start(f"receiver{each}", [*spot.words, *module, spot.address, str(each), str(delay_s)])
        trainer = Client(host, port)
        receivers = [Client(spot.address, each) for spot, each in zip(spots, ports, strict=True)]
        try:
            for client in (trainer, *receivers):
                client.wait_until_up(START_S)
            yield Site(host, trainer, receivers, ports, spots)
        except Exception:
            for log in sorted(folder.iterdir()):
                print(f"-- {log.name}\n{log.read_text()[-2000:]}", file=sys.stderr)
            raise
