"""What becomes of a server that fails, without any server: processes and weights are played."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prefect.logging import disable_run_logger

from rollmill.flows.policies.server_watch import WatchLimits, watch_server
from rollmill.tasks.errors import (
    ParityError,
    RequestError,
    ServiceDiedError,
    ServiceError,
    ServiceStartError,
    SyncError,
)

LIMITS = WatchLimits(max_restarts=2, rejoin_timeout_s=60.0, retry_interval_s=0.01)
IMPATIENT = replace(LIMITS, rejoin_timeout_s=0.1)
PARITY = ParityError("server", "run:1:2", "its log-probabilities differ")


class Process:
    is_running = True
    returncode = 1

    def log_tail(self) -> str:
        return "last words"

    async def stop(self) -> None:
        self.is_running = False


class Server:
    """A server, and its own client, that is healthy or not; starting it again heals it."""

    name = "server"
    span_processes = ("http://10.0.0.1:8000",)

    def __init__(self, events: list[str], *, is_ours: bool, starts: list[Exception | None]) -> None:
        self.events, self.is_ours, self.starts = events, is_ours, starts
        self.process = Process() if is_ours else None
        self.client = self
        self.healthy = True

    async def wait_for_failure(self, alarm: asyncio.Event) -> str:
        await alarm.wait()
        return "" if self.healthy else "it refuses"

    async def is_healthy(self) -> bool:
        return self.healthy

    async def start(self) -> None:
        self.events.append("started")
        if error := self.starts.pop(0) if self.starts else None:
            raise error
        self.process, self.healthy = Process(), True

    async def wait_for_return(self, *, must_sample: bool) -> None:
        self.events += ["awaited until it samples"] if must_sample else []
        while not self.healthy:  # noqa: ASYNC110 - it is healed by a timer
            await asyncio.sleep(0.01)


class Fleet:
    """What a watcher sees of Servers, and every event in the order of its happening."""

    def __init__(
        self,
        *rejoins: Exception | None,
        is_ours: bool,
        n_others: int = 1,
        starts: tuple[Exception | None, ...] = (),
    ) -> None:
        self.events: list[str] = []
        self.server = Server(self.events, is_ours=is_ours, starts=list(starts))
        self.rejoins, self.n_others = list(rejoins), n_others
        self.failed: dict[Server, str] = {}
        self.mute: set[Server] = set()
        self.lost: set[Server] = set()
        self.n_updates: Counter[Server] = Counter()
        self.are_up, self.is_in, self.event = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.are_up.set()

    def alarm(self, server: Server) -> asyncio.Event:
        return self.event

    async def look_again(self, server: Server) -> None:
        self.events.append("let in again")
        self.is_in.set()

    async def fail(self, server: Server, reason: str) -> None:
        self.events.append(f"failed: {reason}")
        self.failed[server] = reason

    def give_up(self, server: Server, reason: str, log_tail: str = "") -> None:
        self.events.append(f"given up: {reason}")
        self.lost.add(server)
        if not self.n_others:
            raise ServiceDiedError(server.name, reason, log_tail)

    async def rejoin(self, server: Server) -> None:
        self.failed.pop(server, None)
        if error := self.rejoins.pop(0) if self.rejoins else None:
            await self.fail(server, str(error))
            raise error
        self.events.append("back")
        self.n_updates[server] += 1
        self.is_in.set()

    async def watched(
        self, limits: WatchLimits = LIMITS, *, is_healthy: bool = False, is_alarmed: bool = True
    ) -> list[str]:
        """Alarm the server's watcher; everything that happens until the server is in the pool, or given up."""
        watching = asyncio.ensure_future(watch_server(self, self.server, limits, self.rejoin))
        self.server.healthy = is_healthy
        if is_alarmed:
            self.event.set()
        is_in = asyncio.ensure_future(self.is_in.wait())
        await asyncio.wait([watching, is_in], timeout=60, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
        watching.cancel()
        is_in.cancel()
        return self.events


@pytest.fixture(autouse=True)
def outside_of_a_flow() -> Iterator[None]:
    with disable_run_logger():
        yield


@pytest.mark.parametrize("is_ours", [True, False])
async def test_a_server_that_answers_after_all_is_admitted_again(is_ours: bool) -> None:
    assert await Fleet(is_ours=is_ours).watched(is_healthy=True) == ["let in again"]


async def test_a_launched_server_is_started_again() -> None:
    assert await Fleet(is_ours=True).watched() == ["failed: it refuses", "started", "back"]


async def test_a_launched_server_that_takes_no_weights_is_started_again() -> None:
    fleet = Fleet(SyncError("broke"), is_ours=True)
    assert await fleet.watched() == [
        *("failed: it refuses", "started"),
        *("failed: broke", "started", "back"),
    ]


async def test_a_launched_server_is_given_up_after_its_restarts_whether_they_start_or_not() -> None:
    fleet = Fleet(PARITY, is_ours=True, starts=(None, ServiceStartError("server", "no memory")))
    events = await fleet.watched()
    assert events.count("started") == LIMITS.max_restarts
    assert events[-1] == "given up: server: no memory, after 2 restarts in a row (max_restarts)"


async def test_a_launched_server_whose_process_cannot_be_ended_is_given_up_alone() -> None:
    fleet = Fleet(is_ours=True, starts=(ServiceError("server", "process 7 did not end"),))
    assert (await fleet.watched())[-1] == "given up: process 7 did not end"


@pytest.mark.parametrize(("updates_between", "n_started"), [(0, LIMITS.max_restarts), (1, 6)])
async def test_only_restarts_without_an_update_in_between_count_against_the_limit(
    updates_between: int, n_started: int
) -> None:
    fleet = Fleet(is_ours=True)
    watching = asyncio.ensure_future(watch_server(fleet, fleet.server, LIMITS, fleet.rejoin))
    for _ in range(6):
        fleet.is_in.clear()
        fleet.server.healthy = False
        fleet.event.set()
        is_in = asyncio.ensure_future(fleet.is_in.wait())
        await asyncio.wait([watching, is_in], timeout=60, return_when=asyncio.FIRST_COMPLETED)
        is_in.cancel()
        if watching.done():
            break
        fleet.n_updates[fleet.server] += updates_between
    watching.cancel()
    assert fleet.events.count("started") == n_started


async def test_the_death_of_the_last_server_ends_the_run_with_its_last_lines() -> None:
    fleet = Fleet(is_ours=True, n_others=0, starts=(ServiceStartError("server", "no"),) * 2)
    with pytest.raises(ServiceDiedError, match=r"(?s)after 2 restarts.*last words"):
        await fleet.watched()


async def fail_in_a_sync(fleet: Fleet) -> list[str]:
    """What becomes of a server that answers, and failed to take weights."""
    fleet.failed[fleet.server] = "the old weights serve: stalled"
    return await fleet.watched(is_healthy=True, is_alarmed=False)


async def test_a_launched_server_that_answers_takes_the_weights_without_a_new_start() -> None:
    assert await fail_in_a_sync(Fleet(is_ours=True)) == ["back"]


async def test_a_launched_server_that_takes_none_again_is_started_again() -> None:
    events = await fail_in_a_sync(Fleet(SyncError("broke"), is_ours=True))
    assert events == ["failed: broke", "started", "back"]


async def test_a_launched_server_whose_requests_stay_held_is_started_again_at_once() -> None:
    fleet = Fleet(is_ours=True)
    fleet.mute.add(fleet.server)
    assert await fail_in_a_sync(fleet) == ["started", "back"]


async def test_an_attached_server_is_awaited_and_taken_back() -> None:
    fleet = Fleet(RequestError("gone again"), is_ours=False)
    asyncio.get_running_loop().call_later(0.05, setattr, fleet.server, "healthy", True)
    assert await fleet.watched() == ["failed: it refuses", "failed: gone again", "back"]


async def test_an_attached_server_that_cannot_sample_is_awaited_until_it_does() -> None:
    fleet = Fleet(is_ours=False)
    fleet.mute.add(fleet.server)
    asyncio.get_running_loop().call_later(0.05, setattr, fleet.server, "healthy", True)
    assert await fleet.watched() == ["failed: it refuses", "awaited until it samples", "back"]


async def test_an_attached_server_is_given_up_when_its_time_is_over() -> None:
    events = await Fleet(is_ours=False).watched(IMPATIENT)
    assert events[-1] == "given up: it refuses; it did not return within 0.1 s"


async def test_an_attached_server_with_wrong_weights_is_given_up_at_once() -> None:
    fleet = Fleet(PARITY, is_ours=False)
    asyncio.get_running_loop().call_later(0.02, setattr, fleet.server, "healthy", True)
    assert (await fleet.watched())[-1] == f"given up: {PARITY}"


async def test_the_death_of_the_trainer_is_no_failure_of_the_servers() -> None:
    fleet = Fleet(ServiceDiedError("trainer", "gone"), is_ours=True)
    with pytest.raises(ServiceDiedError, match="trainer: gone"):
        await fleet.watched()
    assert not fleet.lost
