"""How servers come to the trainer's weights, and back to them, without any: trainer and servers only note."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import msgspec
import numpy as np
import pytest
from prefect.logging import disable_run_logger

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.policies.server_parity import Openings, ServedRun
from rollmill.flows.policies.sync_report import RouteReport, SyncReport, progress_line, sync_metrics
from rollmill.flows.policies.weight_sync import WeightSync
from rollmill.tasks.errors import (
    ConfigError,
    RequestError,
    RequestsHeldError,
    SyncError,
    TransientRequestError,
)
from rollmill.tasks.observe.spans import Recorder, recording, span
from rollmill.tasks.rollout.environments.addition import Addition
from rollmill.tasks.serve.policy_version import PolicyVersion
from rollmill.tasks.serve.server_pool import ServerPool
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.sync.transfer_plan import TransferPlan, lay_out_tensors, share_evenly
from rollmill.tasks.sync.weight_messages import (
    ProcessLocation,
    SendResult,
    SendTarget,
    ServerLocation,
    WeightOffer,
    WeightUpdateRequest,
    WeightUpdateResponse,
)
from rollmill.tasks.sync.weight_parity import LogprobDifferences
from rollmill.tasks.train.service.commands import DigestWeights, WriteWeights

AT = [PolicyVersion("ab", 1, number) for number in range(4)]
TENSORS = lay_out_tensors([("norm", (4,), "float32"), ("head", (4, 4), "float32")])
OFFER = WeightOffer(
    TransferPlan(TENSORS, share_evenly(TENSORS, 1)), "127.0.0.1", 1, ProcessLocation("here", "cpu")
)

DELAY_S = 0.5


@dataclass(eq=False)
class Trainer:
    """Sends nothing; its digest of every tensor is `digest`; a server that stops it waits for `release`."""

    calls: list[str] = field(default_factory=list)
    targets: list[list[SendTarget]] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    shift: float = 0.0
    location: ProcessLocation = OFFER.location

    def __post_init__(self) -> None:
        self.release.set()

    async def offer(self) -> WeightOffer:
        self.calls.append("offer")
        return replace(OFFER, location=self.location)

    async def send(self, targets: Sequence[SendTarget], report: Any, every_s: float) -> list[SendResult]:
        self.calls.append("send")
        self.targets.append(list(targets))
        if report:
            report({each.server: 20 for each in targets})
        await self.release.wait()
        return [SendResult(each.server, 80, 0.0, self.errors.get(each.server, "")) for each in targets]

    async def stop_sending(self, target: SendTarget) -> None:
        self.calls.append("stop_sending")
        self.release.set()

    async def do(self, command: WriteWeights | DigestWeights) -> Any:
        if isinstance(command, WriteWeights):
            self.calls.append(f"write {command.version}" + (" changes" if command.base_snapshot else ""))
            return [f"{command.folder}/{command.version}/0.safetensors"]
        self.calls.append("digests")
        return dict.fromkeys(command.names or [each.name for each in TENSORS], "same")

    async def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        self.calls.append("logprobs")
        return [[-1.0 + self.shift] * (len(each) - 1) for each in sequences]


@dataclass(eq=False)
class Server:
    """A server, and its own client, that takes nothing but the version's name.

    `failing` has errors of orders by transport; `digests` are what it says instead of "same", one for each order;
    `stale` is what it finds otherwise in its live model. `differing` has the layers whose sums differ, one tuple for each order,
    `uncompared` those without sums; `shift` is the error of its log-probabilities in nats.
    """

    url: str = "http://a"
    failing: dict[str, Exception] = field(default_factory=dict)
    digests: list[str] = field(default_factory=list)
    stale: tuple[str, ...] = ()
    differing: list[tuple[str, ...]] = field(default_factory=list)
    uncompared: tuple[str, ...] = ()
    unverifiable: Exception | None = None
    shift: float = 0.0
    verified: list[tuple[str, int]] = field(default_factory=list)
    orders: list[tuple[str, str]] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)
    snapshots: list[tuple[str, str]] = field(default_factory=list)
    loading: Callable[[], Any] | None = None
    release: asyncio.Event = field(default_factory=asyncio.Event)
    held: str = "default"
    location: ServerLocation = field(default_factory=lambda: ServerLocation("elsewhere", "cpu"))
    dies: bool = False
    max_failures_in_a_row = 2

    def __post_init__(self) -> None:
        self.client, self.name = self, f"server {self.url}"
        self.release.set()

    async def is_healthy(self) -> bool:
        return not (self.dies and self.orders)

    async def version(self) -> str:
        return self.held

    async def set_version(self, version: str) -> None:
        self.held = version

    async def read_location(self) -> bytes:
        return msgspec.json.encode(self.location)

    async def tokenize(self, text: str) -> list[int]:
        return [1, 2, 3]

    async def update_weights(self, body: bytes, timeout_s: float) -> bytes:
        request = msgspec.json.decode(body, type=WeightUpdateRequest)
        transport = request.transport
        self.orders.append((transport, request.version))
        self.prefixes.append(request.prefix)
        self.snapshots.append((request.base_snapshot, request.snapshot))
        if self.loading:
            self.loading()
        await self.release.wait()
        if transport in self.failing:
            raise self.failing[transport]
        self.held = request.version
        digest = self.digests.pop(0) if self.digests else "same"
        digests = dict.fromkeys(request.checksums, digest)
        if request.mode == "verify" and self.unverifiable:
            raise self.unverifiable
        if request.mode != "verify":
            differing = self.differing.pop(0) if self.differing else ()
            answer = WeightUpdateResponse(
                80, 0.5, 0.25, digests, differing, self.uncompared, snapshot=request.snapshot
            )
            return msgspec.json.encode(answer)
        self.verified.append((request.version, len(request.checksums)))
        answer = WeightUpdateResponse(80, 0.5, 0.0, digests, self.stale, snapshot=request.snapshot)
        return msgspec.json.encode(answer)

    async def prompt_logprobs(self, sequence: np.ndarray, timeout_s: float) -> np.ndarray:
        return np.full(len(sequence) - 1, -1.0 + self.shift, np.float32)

    async def close(self) -> None:
        """Nothing is open."""


class Tokenizer:
    has_template = False

    def encode(self, messages: Any, tools: Any = ()) -> np.ndarray:
        return np.array([1, 2, 3], np.int32)


class Fleet:
    """Servers of a trainer at version `at`; `holds` counts how often its weights were locked."""

    def __init__(self, folder: Path, n: int = 1, dtype: str = "float32") -> None:
        config = RunConfig.model_validate({"serve": {"dtype": dtype}})
        openings = Openings(Addition(), Tokenizer(), max_tokens=256, timeout_s=10.0)
        self.run = ServedRun("ab", RunFolder(folder), config, ServerPool(), openings)
        self.trainer = Trainer()
        self.services = [Server(f"http://{number}") for number in range(n)]
        self.servers = WeightSync(self.run, self.trainer, self.services)
        self.at, self.is_held = AT[1], False

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[PolicyVersion]:
        self.is_held = True
        yield self.at
        self.is_held = False

    @property
    def admitted(self) -> set[str]:
        return {each.url for each in self.run.pool._admitted}

    async def failed(self) -> Server:
        """A server that has failed after a first sync."""
        await self.servers.update(AT[0])
        await self.servers.fail(self.services[0], "it was away")
        self.services[0].orders.clear()
        self.trainer.calls.clear()
        return self.services[0]


@pytest.fixture
def fleet_of(tmp_path: Path) -> Iterator[Callable[[int], Fleet]]:
    with disable_run_logger():
        yield partial(Fleet, tmp_path)


async def test_a_sync_of_several_servers_asks_the_trainer_once_and_each_server_once(fleet_of) -> None:
    fleet = fleet_of(3)
    await fleet.servers.update(AT[0])
    before = fleet.servers.calls
    fleet.trainer.calls.clear()
    reports = await fleet.servers.update(AT[1])
    assert Counter(fleet.trainer.calls) == {"send": 1, "logprobs": 1, "digests": 1}
    assert [each.held for each in fleet.services] == [str(AT[1])] * 3
    assert len(reports) == 3
    assert fleet.servers.calls - before == 1 + 3 + 3, "one send; of each server an order and its version"


async def test_a_sync_records_how_soon_all_servers_started_and_how_far_apart(fleet_of) -> None:
    fleet, recorder = fleet_of(3), Recorder("flow")
    with recording(recorder, step=3, lane="step"):
        await fleet.servers.update(AT[0])
    (booked,) = (each for each in recorder.take() if each.name == "submitting")
    last, skew = fleet.servers.submitted.metrics()
    assert (booked.lane, booked.step) == ("submitting servers", 3)
    assert (last.name, last.value) == ("submit/last_start_s", pytest.approx(1e-9 * booked.duration_ns))
    assert 0.0 <= skew.value < last.value
    assert fleet.servers.submitted.n_started == 3
    await fleet.servers._verify_whole(fleet.services[0], AT[0])
    assert fleet.servers.submitted.n_started == 3, "of the transfer to all"


async def test_the_wait_for_the_reference_values_is_in_the_lanes_of_the_servers_and_attributed_to_the_trainer(
    fleet_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, recorder, planted = fleet_of(1), Recorder("flow"), dict[str, float]()

    async def slow(command: str, answer: Callable[[Any], Awaitable[Any]], asked: Any) -> Any:
        started = time.perf_counter()
        await asyncio.sleep(DELAY_S)
        planted[command] = time.perf_counter() - started
        return await answer(asked)

    for command in ("logprobs", "do"):
        answer = getattr(fleet.trainer, command)
        monkeypatch.setattr(fleet.trainer, command, partial(slow, command, answer))
    with recording(recorder, step=3, lane="step"), span("sync"):
        await fleet.servers.update(AT[1])
    taken = [each for each in recorder.take() if (each.process, each.lane) == ("http://0", "parity")]
    assert {each.step for each in taken} == {3}
    waited = [each for each in taken if (each.name, each.cause) == ("waiting_for_trainer", "trainer/0")]
    assert sum(1e-9 * each.duration_ns for each in waited) == pytest.approx(max(planted.values()), rel=0.1)


async def test_one_line_names_the_transport_of_all_servers_once(
    fleet_of, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = fleet_of(3)
    await fleet.servers.update(AT[0])
    await fleet.servers.update(AT[1])
    said = [line for line in capsys.readouterr().err.splitlines() if "weights travel" in line]
    assert said == [
        "3 servers, http://0 and 2 more: weights travel by tcp, since trainer and server are on different machines, "
        "or in different containers of one"
    ]


def test_servers_with_another_transport_have_a_separate_line_and_a_new_transport_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = RouteReport()
    for server in ("a", "b", "c"):
        report.note(server, "shm" if server == "b" else "tcp", "it is so")
    with disable_run_logger():
        report.log_new_routes()
        report.note("a", "tcp", "it is so")
        report.note("b", "tcp", "it is so now")
        report.log_new_routes()
        report.log_new_routes()
    assert capsys.readouterr().err.splitlines() == [
        "2 servers, a and 1 more: weights travel by tcp, since it is so",
        "server b: weights travel by shm, since it is so",
        "server b: weights travel by tcp, since it is so now",
    ]


async def test_the_sequences_that_servers_are_compared_on_are_read_and_scored_before_the_sync(
    fleet_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, read = fleet_of(2), list[int]()

    def sequences(folder: RunFolder, step: int, n: int) -> list[np.ndarray]:
        read.append(step)
        return [np.array([1, 2, 3], np.int32)]

    monkeypatch.setattr("rollmill.flows.policies.server_parity.read_batch_sequences", sequences)
    await fleet.servers.parity.note_trainer_before(AT[2])
    assert read == [1]
    assert fleet.trainer.calls == ["logprobs"]
    await fleet.servers.update(AT[2])
    assert read == [1]


async def test_a_server_is_admitted_while_another_still_receives_the_weights(fleet_of) -> None:
    fleet = fleet_of(2)
    fleet.services[1].release.clear()
    fleet.trainer.release.clear()
    syncing = asyncio.ensure_future(fleet.servers.update(AT[0]))
    async with asyncio.timeout(5), fleet.run.pool.lease(0, 1) as client:
        assert client is fleet.services[0]
    fleet.services[1].release.set()
    fleet.trainer.release.set()
    await syncing
    assert fleet.admitted == {"http://0", "http://1"}


async def test_a_server_that_fails_is_removed_and_its_links_are_not_used_again(fleet_of) -> None:
    fleet = fleet_of(2)
    fleet.services[1].failing["tcp"] = RequestError("500 the old weights serve: stalled")
    reports = await fleet.servers.update(AT[0])
    assert [report.server for report in reports] == ["http://0"]
    assert fleet.admitted == {"http://0"}
    assert "the old weights serve: stalled" in fleet.servers.failed[fleet.services[1]]
    fleet.services[1].failing.clear()
    await fleet.servers.rejoin(fleet.services[1], fleet.hold)
    await fleet.servers.update(AT[2])
    first, _, last = fleet.services[1].prefixes
    assert first != last
    assert len(set(fleet.services[0].prefixes)) == 1, "links that did not fail are kept"


@pytest.mark.parametrize(
    ("dies", "error", "then"),
    [
        (False, "500 the old weights serve: NCCL error", "tcp"),
        (False, "500 requests stay held, start this server again: NCCL error", "tcp"),
        (True, "500 the old weights serve: NCCL error", "nccl"),
    ],
)
async def test_a_transport_that_failed_is_not_tried_again_unless_the_server_died(
    fleet_of, dies: bool, error: str, then: str
) -> None:
    fleet = fleet_of(1)
    (server,) = fleet.services
    fleet.trainer.location = ProcessLocation("m1", "cuda", ("g0",))
    server.location, server.dies = ServerLocation("m2", "cuda", ("g7",)), dies
    server.failing["nccl"] = RequestError(error)
    await fleet.servers.update(AT[0])
    assert [transport for transport, _ in server.orders] == ["nccl"]
    server.failing.clear()
    server.dies = False
    await fleet.servers.rejoin(server, fleet.hold)
    await fleet.servers.update(AT[2])
    assert [transport for transport, _ in server.orders] == ["nccl", "files", then]


async def test_links_that_the_trainer_has_dropped_are_not_used_again(fleet_of) -> None:
    fleet = fleet_of(1)
    fleet.trainer.errors["http://0"] = "it straggled"
    await fleet.servers.update(AT[0])
    await fleet.servers.update(AT[1])
    assert len(set(fleet.services[0].prefixes)) == 2


@pytest.mark.parametrize("n_wrong", [1, 2])
async def test_tensors_that_differ_are_sent_once_more_and_not_twice(fleet_of, n_wrong: int) -> None:
    fleet = fleet_of(1)
    fleet.services[0].digests = ["other"] * n_wrong
    await fleet.servers.update(AT[0])
    assert len(fleet.services[0].orders) == 2
    assert (fleet.admitted == {"http://0"}) == (n_wrong == 1)


async def test_trajectories_by_wrong_weights_are_lost_and_those_by_right_ones_kept(fleet_of) -> None:
    fleet = fleet_of(1)
    (server,), pool, version = fleet.services, fleet.servers.run.pool, str(AT[0])
    answers: list[asyncio.Future[None]] = []
    server.loading = lambda: answers.append(asyncio.ensure_future(pool.require_verified(server, [version])))
    server.digests = ["other"]
    await fleet.servers.update(AT[0])
    wrong, right = await asyncio.gather(*answers, return_exceptions=True)
    assert isinstance(wrong, TransientRequestError)
    assert right is None


@pytest.mark.parametrize("n_wrong", [1, 2])
async def test_a_server_whose_live_weights_differ_is_sent_them_once_more(fleet_of, n_wrong: int) -> None:
    fleet = fleet_of(1)
    (server,) = fleet.services
    server.differing = [("layers.1",)] * n_wrong
    await fleet.servers.update(AT[0])
    assert len(server.orders) == 2
    assert (fleet.admitted == {"http://0"}) == (n_wrong == 1)
    assert [*fleet.servers.failed.values()] == [ANY] * (n_wrong - 1)
    assert all("layers.1 (live)" in reason for reason in fleet.servers.failed.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_server_with_the_trainers_weights_is_never_ended_for_its_log_probabilities(
    fleet_of, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = fleet_of(2, dtype)
    summed, verified = fleet.services
    summed.shift = verified.shift = 5.0
    verified.uncompared = ("layers.0",)
    (*reports,) = await fleet.servers.update(AT[1])
    assert fleet.admitted == {"http://0", "http://1"}
    assert [each.alarmed for each in reports] == [True, True]
    said = capsys.readouterr().err
    assert "differ from the trainer's by 5 nats on average" in said
    assert "every layer of its live model has the trainer's weights" in said
    assert "all its weights were compared" in said
    assert [each.verified for each in fleet.services] == [[], [(str(AT[1]), len(TENSORS))]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
async def test_a_server_whose_weights_cannot_be_compared_is_ended_in_single_precision_on_cpus_only(
    fleet_of, dtype: str, device: str
) -> None:
    fleet = fleet_of(1, dtype)
    fleet.trainer.location = ProcessLocation("here", device)
    (server,) = fleet.services
    server.shift, server.uncompared = 5.0, ("layers.0",)
    server.unverifiable = RequestError("500 a second copy of the model needs up to 9 MiB")
    await fleet.servers.update(AT[1])
    assert (fleet.admitted == {"http://0"}) == ((dtype, device) != ("float32", "cpu"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
async def test_rounding_of_a_gpus_kernels_in_single_precision_is_no_alarm(fleet_of, device: str) -> None:
    fleet = fleet_of(1)
    fleet.trainer.location = ProcessLocation("here", device)
    fleet.services[0].shift = 0.0014
    (report,) = await fleet.servers.update(AT[1])
    assert report.alarmed == (device == "cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_server_that_computes_another_function_of_the_start_model_ends_the_start(
    fleet_of, dtype: str
) -> None:
    fleet = fleet_of(1, dtype)
    (server,) = fleet.services
    server.shift = 0.2
    with pytest.raises(
        ConfigError, match=r"http://0.* by 0\.2 nats on average; the limit is 0\.1.*serve\.extra_args"
    ):
        await fleet.servers.update(AT[0])
    assert not fleet.admitted


async def test_a_server_whose_log_probabilities_did_not_change_is_checked(
    fleet_of, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = fleet_of(1, "bfloat16")
    (server,) = fleet.services
    tokens = np.arange(100, dtype=np.int32)
    monkeypatch.setattr("rollmill.flows.policies.server_parity.read_batch_sequences", lambda *_: [tokens])
    await fleet.servers.update(AT[0])
    await fleet.servers.parity.note_trainer_before(AT[1])
    await fleet.servers.note_servers_before(AT[1])
    fleet.trainer.shift = 0.001
    server.stale = ("lm_head",)
    server.uncompared = ("lm_head.weight",)
    await fleet.servers.update(AT[1])
    assert "it computes with old weights" not in capsys.readouterr().err, "the weights were compared"
    assert not fleet.admitted
    assert "lm_head (live)" in fleet.servers.failed[server]


async def test_all_weights_are_compared_every_so_many_versions_before_a_server_samples(fleet_of) -> None:
    fleet = fleet_of(2)
    sync = fleet.run.config.sync.model_copy(update={"verify_every": 2, "checksums": 1})
    fleet.run.config = fleet.run.config.model_copy(update={"sync": sync})
    fleet.services[1].stale = ("lm_head",)
    reports = [await fleet.servers.update(version) for version in AT[1:3]]
    assert [each.verified for each in fleet.services] == [[(str(AT[2]), len(TENSORS))]] * 2
    assert [[each.verify_s > 0 for each in of_one] for of_one in reports] == [[False, False], [True]]
    assert fleet.admitted == {"http://0"}
    assert "lm_head (live)" in fleet.servers.failed[fleet.services[1]]


async def test_a_returning_server_loads_files_while_the_trainer_is_free(fleet_of) -> None:
    fleet = fleet_of(1)
    server = await fleet.failed()
    held: list[bool] = []
    server.loading = lambda: held.append(fleet.is_held)
    await fleet.servers.rejoin(server, fleet.hold)
    assert server.orders == [("files", str(AT[1]))]
    assert held == [False]
    assert fleet.admitted == {"http://0"}
    assert not fleet.servers.failed


async def test_a_version_that_changed_meanwhile_is_loaded_with_the_weights_locked(fleet_of) -> None:
    fleet = fleet_of(1)
    server = await fleet.failed()
    held: list[bool] = []

    def load() -> None:
        held.append(fleet.is_held)
        fleet.at = AT[2]

    server.loading = load
    await fleet.servers.rejoin(server, fleet.hold)
    assert server.orders == [("files", str(AT[1])), ("files", str(AT[2]))]
    assert held == [False, True]
    assert server.held == str(AT[2])
    assert fleet.admitted == {"http://0"}


async def test_a_server_that_cannot_read_the_files_is_sent_the_weights(fleet_of) -> None:
    fleet = fleet_of(1)
    server = await fleet.failed()
    server.failing["files"] = RequestError("500 the old weights serve: no such file")
    await fleet.servers.rejoin(server, fleet.hold)
    assert [transport for transport, _ in server.orders] == ["files", "tcp"]
    assert fleet.admitted == {"http://0"}


async def test_a_server_whose_requests_stay_held_is_not_admitted_and_waits_for_a_restart(fleet_of) -> None:
    fleet = fleet_of(1)
    server = await fleet.failed()
    server.failing["files"] = RequestError("500 requests stay held, start this server again")
    with pytest.raises(RequestsHeldError):
        await fleet.servers.rejoin(server, fleet.hold)
    assert fleet.servers.mute == {server}
    assert not fleet.admitted


async def test_a_server_that_still_has_the_weights_is_admitted_without_a_transfer(fleet_of) -> None:
    fleet = fleet_of(1)
    await fleet.servers.update(AT[1])
    server = fleet.services[0]
    server.orders.clear()
    await fleet.servers.fail(server, "it was away")
    await fleet.servers.rejoin(server, fleet.hold)
    assert not server.orders
    assert fleet.admitted == {"http://0"}
    # What it has is not known once it begins to load other weights.
    await fleet.servers.fail(server, "it was away")
    fleet.at, server.failing["files"] = AT[2], RequestError("500 the old weights serve: stalled")
    server.failing["tcp"] = RequestError("500 the old weights serve: stalled")
    with pytest.raises(SyncError):
        await fleet.servers.rejoin(server, fleet.hold)
    fleet.at = AT[1]
    server.failing.clear()
    server.orders.clear()
    await fleet.servers.rejoin(server, fleet.hold)
    assert server.orders


async def test_a_sync_that_is_cancelled_uses_its_links_no_more(fleet_of) -> None:
    fleet = fleet_of(1)
    await fleet.servers.update(AT[0])
    server = fleet.services[0]
    server.release.clear()
    ordered = asyncio.Event()
    server.loading = ordered.set
    syncing = asyncio.ensure_future(fleet.servers.update(AT[1]))
    await asyncio.wait_for(ordered.wait(), 5)
    syncing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await syncing
    server.release.set()
    await fleet.servers.update(AT[1])
    assert server.prefixes[2] != server.prefixes[1]


async def test_weights_by_files_for_all_are_written_once_and_nothing_is_sent(
    tmp_path: Path, fleet_of
) -> None:
    fleet = fleet_of(2)
    files = fleet.run.config.model_copy(
        update={"sync": fleet.run.config.sync.model_copy(update={"transport": "files"})}
    )
    fleet.run.config = files
    await fleet.servers.update(AT[0])
    assert [transport for each in fleet.services for transport, _ in each.orders] == ["files"] * 2
    assert fleet.trainer.calls.count("write 0") == 1
    assert "send" not in fleet.trainer.calls


def set_sync(fleet: Fleet, **settings: Any) -> None:
    """Other settings of the weight sync."""
    sync = fleet.run.config.sync.model_copy(update=settings)
    fleet.run.config = fleet.run.config.model_copy(update={"sync": sync})


async def test_a_server_gets_the_changes_of_what_it_received_last(fleet_of) -> None:
    fleet = fleet_of(2)
    set_sync(fleet, send="changes")
    for version in AT[:3]:
        await fleet.servers.update(version)
    first, second = fleet.services
    assert first.snapshots == second.snapshots
    (base, zero), (base_one, one), (base_two, two) = first.snapshots
    assert (base, base_one, base_two) == ("", zero, one)
    assert len({zero, one, two}) == 3
    for targets, expected in zip(fleet.trainer.targets, first.snapshots, strict=True):
        assert {(each.base_snapshot, each.snapshot) for each in targets} == {expected}


async def test_servers_that_read_files_get_changes_if_all_hold_the_same_snapshot(fleet_of) -> None:
    fleet = fleet_of(2)
    set_sync(fleet, send="changes", transport="files")
    for version in AT[:2]:
        await fleet.servers.update(version)
    first, second = fleet.services
    assert first.snapshots == second.snapshots
    assert first.snapshots[1][0] == first.snapshots[0][1]
    second.failing["files"] = RequestError("500 the old weights serve: stalled")
    await fleet.servers.update(AT[2])
    second.failing.clear()
    fleet.servers.failed.clear()
    fleet.servers._failed_transports.clear()
    await fleet.servers.update(AT[3])
    # One of them holds less, so both read the whole.
    assert [each.snapshots[-1][0] for each in (first, second)] == ["", ""]
    written = [each for each in fleet.trainer.calls if each.startswith("write")]
    assert written == ["write 0", "write 1 changes", "write 2 changes", "write 3"]


async def test_whole_weights_have_no_snapshot(fleet_of) -> None:
    fleet = fleet_of(1)
    for version in AT[:2]:
        await fleet.servers.update(version)
    assert fleet.services[0].snapshots == [("", ""), ("", "")]


@pytest.mark.parametrize(
    "what", ["failed", "given up", "other weights", "trainer restarted", "by files", "by shm"]
)
async def test_a_server_whose_weights_are_not_known_gets_the_whole(fleet_of, what: str) -> None:
    fleet = fleet_of(1)
    (server,) = fleet.services
    set_sync(fleet, send="changes")
    await fleet.servers.update(AT[0])
    version = AT[1]
    if what == "failed":
        server.failing["tcp"] = RequestError("500 the old weights serve: stalled")
        await fleet.servers.update(AT[1])
        server.failing.clear()
        fleet.servers.failed.clear()
        version = AT[2]
    elif what == "given up":
        fleet.trainer.errors["http://0"] = "it straggled"
        await fleet.servers.update(AT[1])
        version = AT[2]
    elif what == "other weights":
        server.digests = ["other"]
        await fleet.servers.update(AT[1])
        assert server.snapshots[-2][0], "the changes"
        assert not server.snapshots[-1][0], "the whole, once more"
        return
    elif what == "trainer restarted":
        version = replace(AT[1], incarnation=AT[1].incarnation + 1)
    elif what == "by files":
        await fleet.servers.fail(server, "it was away")
        fleet.at = AT[1]
        await fleet.servers.rejoin(server, fleet.hold)
        version = AT[2]
    else:
        server.location = ServerLocation("here", "cpu")
        fleet.servers._routes.clear()
        fleet.trainer.location = ProcessLocation("here", "cpu")
    await fleet.servers.update(version)
    assert server.snapshots[-1][0] == ""


async def test_a_long_transfer_is_reported(fleet_of, capsys: pytest.CaptureFixture[str]) -> None:
    await fleet_of(2).servers.update(AT[0])
    assert "version 0 -> 2 servers: 0.0 of 0.0 GB" in capsys.readouterr().err


def test_progress_names_version_servers_bytes_and_seconds() -> None:
    line = progress_line(12, {"http://a": 1_100_000_000, "http://b": 2_000_000_000}, 7_100_000_000, 12.3)
    assert line == "version 12 -> 2 servers: 3.1 of 14.2 GB, 12 s (http://a: 1.1 GB, http://b: 2.0 GB)"


def test_metrics_of_a_sync_are_sums_and_worst_cases() -> None:
    reports = [
        # It got the version's name alone.
        SyncReport("c"),
        SyncReport("a", 10, 1.0, 0.5, 0.1, LogprobDifferences(1e-7, 1e-6, 1e-6), slope=0.9, whole_bytes=40),
        SyncReport(
            "b",
            10,
            3.0,
            0.2,
            0.3,
            LogprobDifferences(1e-6, 2e-6, 1e-5),
            slope=1.0,
            alarmed=True,
            whole_bytes=40,
        ),
    ]
    values = {metric.name: metric.value for metric in sync_metrics(reports, 7)}
    assert values == {
        "sync/sent_bytes": 20.0,
        "sync/sent_share": 0.25,
        "sync/servers": 3.0,
        "sync/transfer_s": 3.0,
        "sync/held_s": 0.5,
        "sync/parity_s": 0.3,
        "sync/verify_s": 0.0,
        "sync/logprob_difference": 1e-5,
        "sync/logprob_difference_mean": 1e-6,
        "sync/logprob_difference_p99": 2e-6,
        "sync/logprob_slope": 0.9,
        "sync/parity_alarms": 1.0,
        "sync/control_calls": 7.0,
    }
