"""What becomes of a request to the pool when servers fail it."""

import asyncio
import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from rollmill.tasks.errors import ConnectionLostError, RequestError, RolloutError, TransientRequestError
from rollmill.tasks.rollout.completions import ATTEMPTS, PoolSampler
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment import Example
from rollmill.tasks.rollout.trajectory import TrajectoryRequest
from rollmill.tasks.serve.responses import Completion
from rollmill.tasks.serve.server_pool import ServerPool

WORK = TrajectoryRequest("ab.7.0.0", 7, 0, 0, Example("0", {}), seed=3, temperature=1.0)
PROMPT = np.array([5, 6], np.int32)
LATER = 1e9
GOOD = Completion(np.array([9, 1], np.int32), np.zeros(2, np.float32), "stop", ((0, "ab:1:4"),))
BUSY, LOST = TransientRequestError("503"), ConnectionLostError("refused")


class Server:
    """A client that answers by a script, the last line again and again."""

    def __init__(self, url: str, *script: Completion | Exception) -> None:
        self.url, self.script = url, list(script)
        self.max_failures_in_a_row = 5
        self.asked = 0

    async def generate(self, token_ids: np.ndarray, *, until: float, **sampling: object) -> Completion:
        act = self.script[min(self.asked, len(self.script) - 1)]
        self.asked += 1
        if isinstance(act, Exception):
            raise act
        return act


def sampler_over(servers: Sequence[Server], backoff_s: float = 0.001) -> PoolSampler:
    pool = ServerPool()
    for server in servers:
        pool.admit(server)
    return PoolSampler(pool, RolloutConfig(), "ab", 60.0, backoff_s=backoff_s)


def retries(sampler: PoolSampler) -> float:
    return {metric.name: metric.value for metric in sampler.pool.metrics()}["serve/retries"]


async def test_an_answer_names_its_server_and_the_policys_version() -> None:
    sampled = await sampler_over([Server("http://a", GOOD)]).sample(WORK, PROMPT, LATER)
    assert (sampled.server, sampled.version_spans) == ("http://a", [(0, 4)])


@pytest.mark.parametrize("error", [BUSY, LOST])
async def test_a_request_with_a_transient_error_is_retried_on_another_server(error: Exception) -> None:
    servers = [Server("http://a", error), Server("http://b", GOOD)]
    sampler = sampler_over(servers)
    assert (await sampler.sample(WORK, PROMPT, LATER)).server == "http://b"
    assert [server.asked for server in servers] == [1, 1]
    assert retries(sampler) == 1


async def test_a_single_server_is_asked_again() -> None:
    server = Server("http://a", BUSY, BUSY, GOOD)
    sampler = sampler_over([server])
    assert (await sampler.sample(WORK, PROMPT, LATER)).finish_reason == "stop"
    assert server.asked == 3


async def test_a_request_gives_up_after_its_attempts() -> None:
    server = Server("http://a", BUSY)
    with pytest.raises(TransientRequestError):
        await sampler_over([server]).sample(WORK, PROMPT, LATER)
    assert server.asked == ATTEMPTS == 4


async def test_a_request_with_a_permanent_error_is_not_retried() -> None:
    servers = [Server("http://a", RequestError("400")), Server("http://b", GOOD)]
    with pytest.raises(RequestError, match="400"):
        await sampler_over(servers).sample(WORK, PROMPT, LATER)
    assert servers[1].asked == 0


async def test_a_group_moves_from_a_server_that_failed_one_of_its_requests() -> None:
    servers = [Server("http://a", BUSY, GOOD), Server("http://b", GOOD)]
    sampler = sampler_over(servers)
    first = await sampler.sample(WORK, PROMPT, LATER)
    second = await sampler.sample(WORK, PROMPT, LATER)
    assert (first.server, second.server) == ("http://b", "http://b")


async def test_a_server_that_always_fails_draws_a_few_requests_of_many_groups() -> None:
    servers = [Server("http://a", BUSY), Server("http://b", GOOD)]
    sampler = sampler_over(servers)
    for group in range(50):
        work = dataclasses.replace(WORK, group=group)
        assert (await sampler.sample(work, PROMPT, LATER)).server == "http://b"
    assert servers[0].asked == servers[0].max_failures_in_a_row


async def test_a_request_waits_for_a_server_until_its_deadline() -> None:
    with pytest.raises(TimeoutError):
        await sampler_over([]).sample(WORK, PROMPT, asyncio.get_running_loop().time() + 0.05)


async def test_no_attempt_starts_after_the_deadline() -> None:
    server = Server("http://a", BUSY)
    sampler = sampler_over([server], backoff_s=30.0)
    with pytest.raises(TimeoutError):
        await sampler.sample(WORK, PROMPT, asyncio.get_running_loop().time() + 0.5)
    assert server.asked == 1


async def test_weights_of_another_run_are_an_error() -> None:
    stranger = Completion(GOOD.token_ids, GOOD.logprobs, "stop", ((0, "cd:1:4"),))
    with pytest.raises(RolloutError, match="cd:1:4"):
        await sampler_over([Server("http://a", stranger)]).sample(WORK, PROMPT, LATER)
