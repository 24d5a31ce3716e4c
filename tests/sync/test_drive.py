"""The order of a sync, its deadlines, and what becomes of failures; with a trainer and servers that only note."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from rollmill.tasks.errors import (
    ConfigError,
    RequestsHeldError,
    ServiceDiedError,
    SyncError,
    TransientRequestError,
)
from rollmill.tasks.sync.broadcast import Broadcast, fetch_logprobs, find_route
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.sync.transfer_plan import TransferPlan
from rollmill.tasks.sync.weight_messages import (
    ProcessLocation,
    SendResult,
    SendTarget,
    ServerLocation,
    WeightOffer,
    WeightUpdateResponse,
)
from rollmill.tasks.sync.weight_parity import LogprobDifferences
from tests.stubs.one_server_sync import send_to_server

SOON, PATIENT = SyncConfig(timeout_s=0.2, stall_timeout_s=0.1), SyncConfig(timeout_s=60.0)
SHORT_STALL = SyncConfig(timeout_s=60.0, stall_timeout_s=0.1)
VERSION = "run:1:2"
HERE = ProcessLocation("here", "cpu")


@dataclass(eq=False)
class Part:
    """One end of a sync; what is in `slow` never ends, in `failing` raises, in `meeting` waits for the other end."""

    events: list[str] = field(default_factory=list)
    slow: set[str] = field(default_factory=set)
    failing: dict[str, Exception] = field(default_factory=dict)
    meeting: dict[str, asyncio.Barrier] = field(default_factory=dict)

    async def note(self, event: str) -> None:
        self.events.append(event)
        if event in self.meeting:
            await self.meeting[event].wait()
        if event in self.failing:
            raise self.failing[event]
        if event in self.slow:
            await asyncio.Event().wait()
        self.events.append(f"{event} done")


@dataclass(eq=False)
class Trainer(Part):
    """A trainer that sends nothing; `errors` and `stopped` are of its transfers."""

    errors: dict[str, str] = field(default_factory=dict)
    targets: list[SendTarget] = field(default_factory=list)
    stopped: list[SendTarget] = field(default_factory=list)

    async def offer(self) -> WeightOffer:
        await self.note("offer")
        return WeightOffer(TransferPlan(), "127.0.0.1", 1, HERE)

    async def send(self, targets: Sequence[SendTarget], report: Any, every_s: float) -> list[SendResult]:
        self.targets += targets
        await self.note("send")
        return [SendResult(each.server, 8, 0.0, self.errors.get(each.server, "")) for each in targets]

    async def stop_sending(self, target: SendTarget) -> None:
        self.stopped.append(target)
        await self.note("stop_sending")

    async def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        await self.note("logprobs")
        return [[-1.0] * (len(each) - 1) for each in sequences]


@dataclass(eq=False)
class Server(Part):
    """A server, and its client, that takes nothing."""

    url: str = "http://server"
    machine: str = "here"
    shift: float = 0.0
    orders: list[dict[str, Any]] = field(default_factory=list)

    async def read_location(self) -> bytes:
        await self.note("place")
        return msgspec.json.encode(ServerLocation(self.machine, "cpu", (), 2))

    async def update_weights(self, request: bytes, timeout_s: float) -> bytes:
        self.orders.append(msgspec.json.decode(request))
        await self.note("take")
        return msgspec.json.encode(WeightUpdateResponse(8, 0.0, 0.0))

    async def prompt_logprobs(self, sequence: np.ndarray, timeout_s: float) -> np.ndarray:
        await self.note("prompt_logprobs")
        return np.full(len(sequence) - 1, -1.0 + self.shift, np.float32)


async def send(trainer: Trainer, server: Server, config: SyncConfig = PATIENT) -> WeightUpdateResponse:
    return await send_to_server(trainer, server, VERSION, config, "a")


async def send_to_all(
    trainer: Trainer, *servers: Server, config: SyncConfig = PATIENT
) -> list[WeightUpdateResponse | SyncError]:
    """What each server says, or how it failed."""
    routes = {server: SendTarget(server.url, "tcp", f"to {server.url}") for server in servers}
    broadcast = Broadcast(trainer, await trainer.offer(), routes, VERSION, config)
    sending = asyncio.ensure_future(broadcast.send())
    try:
        return await asyncio.gather(*map(broadcast.update_server, servers), return_exceptions=True)
    finally:
        sending.cancel()


async def parity(trainer: Trainer, server: Server, config: SyncConfig = PATIENT) -> float:
    sequences = [np.arange(5, dtype=np.int32)] * 2
    expecting = trainer.logprobs([each.tolist() for each in sequences])
    expected, found = await fetch_logprobs(expecting, server, sequences, VERSION, timeout_s=config.timeout_s)
    return LogprobDifferences.measure(expected, found).largest


async def test_sender_and_receiver_work_at_the_same_time_and_under_one_name() -> None:
    both = asyncio.Barrier(2)
    trainer, server = Trainer(meeting={"send": both}), Server(meeting={"take": both})
    assert await send(trainer, server) == WeightUpdateResponse(8, 0.0, 0.0)
    (target,), (order,) = trainer.targets, server.orders
    # By tcp one worker receives for both.
    assert (target.transport, target.prefix, target.workers) == (order["transport"], order["prefix"], 1)
    assert order["version"] == VERSION


async def test_a_sync_of_several_servers_is_one_command_to_the_trainer_and_one_request_to_each() -> None:
    trainer, servers = Trainer(), [Server(url=f"http://{number}") for number in range(3)]
    assert len(await send_to_all(trainer, *servers)) == 3
    assert trainer.events.count("send") == 1
    assert [each.server for each in trainer.targets] == [each.url for each in servers]
    assert [server.events.count("take") for server in servers] == [1, 1, 1]


async def test_a_server_that_is_done_does_not_wait_for_a_slower_one() -> None:
    quick, slow = Server(url="http://quick"), Server(url="http://slow", slow={"take"})
    answer, error = await send_to_all(Trainer(slow={"send"}), quick, slow, config=SOON)
    assert answer == WeightUpdateResponse(8, 0.0, 0.0)
    assert "http://slow: receiving version run:1:2 by tcp took longer than sync.timeout_s = 0.2 s" in str(
        error
    )


async def test_a_server_that_the_trainer_gave_up_is_reported_with_the_reason_and_the_others_continue() -> (
    None
):
    gone, other = Server(url="http://gone", slow={"take"}), Server(url="http://other")
    trainer = Trainer(errors={"http://gone": "no byte for 20 s"})
    error, answer = await send_to_all(trainer, gone, other, config=SHORT_STALL)
    assert answer == WeightUpdateResponse(8, 0.0, 0.0)
    assert "http://gone: receiving version run:1:2 by tcp: no byte for 20 s" in str(error)


@pytest.mark.parametrize("failing", [{}, {"stop_sending": TransientRequestError("no answer")}])
async def test_the_transfer_to_a_server_that_refuses_is_ended_and_its_error_is_the_servers(failing) -> None:
    refusal = TransientRequestError("409 still receiving version run:1:1")
    refusing, other = Server(url="http://refusing", failing={"take": refusal}), Server(url="http://other")
    trainer = Trainer(slow={"send"}, failing=failing)
    error, answer = await send_to_all(trainer, refusing, other)
    assert [each.server for each in trainer.stopped] == ["http://refusing"]
    assert "http://refusing: receiving version run:1:2 by tcp: 409 still receiving" in str(error)
    assert answer == WeightUpdateResponse(8, 0.0, 0.0)


async def test_a_trainer_that_cannot_send_fails_every_server_that_has_not_taken() -> None:
    trainer = Trainer(failing={"send": SyncError("rank 1: out of memory")})
    servers = [Server(url=f"http://{n}", slow={"take"}) for n in range(2)]
    errors = await send_to_all(trainer, *servers, config=SHORT_STALL)
    assert all("trainer: rank 1: out of memory" in str(error) for error in errors)


@pytest.mark.parametrize("slow", ["send", "take"])
async def test_every_slow_call_ends_at_the_deadline_and_is_named(slow: str) -> None:
    with pytest.raises(
        SyncError, match=r"http://server: receiving version run:1:2.* sync\.timeout_s = 0\.2 s"
    ):
        await send(Trainer(slow={slow}), Server(slow={"take"}), SOON)


async def test_a_server_that_does_not_say_where_it_runs_ends_at_the_deadline_by_name() -> None:
    with pytest.raises(
        SyncError, match=r"http://server: reporting where it runs took .* sync\.timeout_s = 0\.2"
    ):
        await send(Trainer(), Server(slow={"place"}), SOON)


@pytest.mark.parametrize("slow", ["logprobs", "prompt_logprobs"])
async def test_a_comparison_that_takes_too_long_ends_at_the_deadline_by_name(slow: str) -> None:
    with pytest.raises(SyncError, match="comparing log-probabilities at version run:1:2 took longer"):
        await parity(Trainer(slow={slow}), Server(slow={slow}), SOON)


async def test_a_failure_during_a_transfer_names_server_version_and_transport() -> None:
    server = Server(failing={"take": TransientRequestError("500 the old weights serve: out of memory")})
    with pytest.raises(
        SyncError, match=r"http://server: receiving version run:1:2 by tcp: 500 .* out of memory"
    ) as error:
        await send(Trainer(), server)
    assert not isinstance(error.value, RequestsHeldError)


async def test_a_server_whose_requests_stay_held_has_a_different_error_than_one_with_old_weights() -> None:
    server = Server(
        failing={"take": TransientRequestError("500 requests stay held, start this server again")}
    )
    with pytest.raises(RequestsHeldError, match=r"http://server: .* requests stay held"):
        await send(Trainer(), server)


async def test_the_death_of_the_trainer_is_reported_as_the_trainers() -> None:
    with pytest.raises(ServiceDiedError, match="trainer: it ended"):
        await send(Trainer(failing={"send": ServiceDiedError("trainer", "it ended")}), Server(slow={"take"}))


async def test_a_transport_that_cannot_reach_a_server_names_the_server_and_the_setting() -> None:
    trainer, config = Trainer(), SyncConfig(transport="shm")
    with pytest.raises(
        ConfigError, match=r"sync\.transport = 'shm': server http://server: .*different machines"
    ):
        await find_route(Server(machine="elsewhere"), await trainer.offer(), config)


async def test_the_log_probabilities_of_both_are_fetched() -> None:
    assert await parity(Trainer(), Server(shift=2**-15)) == 2**-15
    assert math.isnan(await parity(Trainer(), Server(shift=math.nan)))
