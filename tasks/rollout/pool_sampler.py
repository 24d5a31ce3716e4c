"""Samples from the pool of vLLM servers; transient errors are sent again."""

import asyncio
from dataclasses import dataclass

import numpy as np
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from tasks.errors import RolloutError, TransientRequestError
from tasks.rollout.config import RolloutConfig
from tasks.rollout.sampling import Sampled
from tasks.rollout.trajectory import Work
from tasks.serve.answers import Completion
from tasks.serve.pool import ServerPool
from tasks.serve.version import PolicyVersion


@dataclass(frozen=True, slots=True)
class PoolSampler:
    """A Sampler over a pool: a group's requests go to one server, for its prefix cache.

    Attributes:
        run: id of the run; an answer by weights of another run is an error.
        stop_token_ids: what ends a turn besides an end of sequence.
    """

    pool: ServerPool
    config: RolloutConfig
    run: str
    timeout_s: float
    stop_token_ids: tuple[int, ...] = ()

    async def sample(self, work: Work, token_ids: np.ndarray, until: float) -> Sampled:
        """One completion of `token_ids`; see Sampler."""
        sends = AsyncRetrying(
            retry=retry_if_exception_type(TransientRequestError),
            stop=stop_after_attempt(self.config.max_attempts),
            wait=wait_exponential_jitter(
                initial=self.config.retry_backoff_s, jitter=self.config.retry_backoff_s
            ),
            reraise=True,
        )
        async with asyncio.timeout_at(until):
            return await sends(self._send, work, token_ids)

    async def _send(self, work: Work, token_ids: np.ndarray) -> Sampled:
        async with self.pool.lease(work.group, len(token_ids) + self.config.max_completion_tokens) as server:
            completion = await server.generate(
                token_ids,
                max_tokens=self.config.max_completion_tokens,
                temperature=work.temperature,
                seed=turn_seed(work.seed, len(token_ids)),
                stop_token_ids=self.stop_token_ids,
                timeout_s=self.timeout_s,
            )
            return Sampled(
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                version_spans=self._versions(completion),
                finish_reason=completion.finish_reason,
                server=server.url,
            )

    def _versions(self, completion: Completion) -> list[tuple[int, int]]:
        spans = [(start, PolicyVersion.parse(version)) for start, version in completion.version_spans]
        if strangers := {str(version) for _, version in spans if version.run != self.run}:
            raise RolloutError(
                f"a server answered with weights of another run: {', '.join(sorted(strangers))}"
            )
        return [(start, version.version) for start, version in spans]


def turn_seed(seed: int, n_tokens: int) -> int:
    """Seed of the turn that goes on from `n_tokens` tokens: another for each turn, or they would share their luck."""
    return (seed + n_tokens) % (1 << 63)
