"""Which servers are readmitted to the pool after they were removed, without any server."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.policies.server_parity import ServedRun
from rollmill.flows.policies.weight_sync import WeightSync
from rollmill.tasks.errors import TransientRequestError
from rollmill.tasks.serve.policy_version import PolicyVersion
from rollmill.tasks.serve.server_pool import ServerPool
from rollmill.tasks.store.folders import RunFolder

VERSION = PolicyVersion("ab", 1, 4)


class Server:
    """A server, and its own client, that answers /health and has the policy's weights, and samples or not."""

    name, url = "server", "http://a"
    max_failures_in_a_row = 2

    def __init__(self) -> None:
        self.client = self
        self.samples = True
        self.n_probes = 0

    async def is_healthy(self) -> bool:
        return True

    async def version(self) -> str:
        return str(VERSION)

    async def can_sample(self) -> bool:
        self.n_probes += 1
        return self.samples

    async def close(self) -> None:
        """Nothing is open."""


class Fleet:
    """One server in the pool, with its weights verified."""

    def __init__(self, folder: Path) -> None:
        # No prompt is compared here, so there are no openings.
        self.run = ServedRun("ab", RunFolder(folder), RunConfig(), ServerPool(), openings=None)
        self.server = Server()
        self.servers = WeightSync(self.run, None, [self.server])
        self.servers._admit(self.server, VERSION)

    def fail_requests(self, n: int) -> None:
        for _ in range(n):
            self.run.pool.note_failure(self.server, TransientRequestError("500"))

    async def is_asked(self) -> bool:
        try:
            async with asyncio.timeout(0.01), self.run.pool.lease(0, 1):
                return True
        except TimeoutError:
            return False


@asynccontextmanager
async def at_version() -> AsyncIterator[PolicyVersion]:
    yield VERSION


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with disable_run_logger():
        yield Fleet(tmp_path)


async def test_a_server_that_fails_one_request_after_the_other_and_cannot_sample_has_failed(fleet) -> None:
    fleet.server.samples = False
    fleet.fail_requests(2)
    await fleet.servers.look_again(fleet.server)
    assert fleet.servers.mute == {fleet.server}
    assert "fails generation requests" in fleet.servers.failed[fleet.server]
    assert not await fleet.is_asked()


async def test_a_server_that_samples_after_all_is_admitted_with_its_failures_reset(fleet) -> None:
    fleet.fail_requests(2)
    assert not await fleet.is_asked()
    await fleet.servers.look_again(fleet.server)
    fleet.fail_requests(1)
    assert await fleet.is_asked()


async def test_a_server_that_failed_one_request_is_asked_for_its_health_alone(fleet) -> None:
    fleet.fail_requests(1)
    await fleet.servers.look_again(fleet.server)
    assert fleet.server.n_probes == 0
    assert await fleet.is_asked()


async def test_a_server_that_samples_again_is_admitted_when_it_still_has_its_weights(fleet) -> None:
    fleet.fail_requests(2)
    fleet.servers.mute.add(fleet.server)
    fleet.servers.failed[fleet.server] = "it fails generations"
    await fleet.servers.rejoin(fleet.server, at_version)
    assert not fleet.servers.mute
    assert not fleet.run.pool.is_suspect(fleet.server)
    assert await fleet.is_asked()
