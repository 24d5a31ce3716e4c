"""Samples from the pool of vLLM servers; transient errors are sent again, to another server when there is one."""

import asyncio
from dataclasses import dataclass

import numpy as np

from tasks.errors import RolloutError, TransientRequestError
from tasks.observe.retries import retries
from tasks.observe.spans import span
from tasks.rollout.config import RolloutConfig
from tasks.rollout.sampling import Sampled
from tasks.rollout.trajectory import Work
from tasks.serve.answers import Completion
from tasks.serve.client import VllmClient
from tasks.serve.pool import ServerPool
from tasks.serve.version import PolicyVersion


@dataclass(frozen=True, slots=True)
class PoolSampler:
    """A Sampler over a pool: a group's requests go to one server, for its prefix cache.

    Attributes:
        run: id of the run; an answer by weights of another run is an error.
        timeout_s: seconds that one send may take.
        stop_token_ids: what ends a turn besides an end of sequence.
    """

    pool: ServerPool
    config: RolloutConfig
    run: str
    timeout_s: float
    stop_token_ids: tuple[int, ...] = ()

    async def sample(
        self, work: Work, token_ids: np.ndarray, until: float, routing_from: int | None = None
    ) -> Sampled:
        """One completion of `token_ids`; see Sampler."""
        sends = retries(
            TransientRequestError,
            attempts=self.config.max_attempts,
            backoff_s=self.config.retry_backoff_s,
            longest_s=self.timeout_s,
        )
        failed_on: set[VllmClient] = set()
        async with asyncio.timeout_at(until) as waiting:
            async for send in sends:
                with send:
                    return await self._send(work, token_ids, waiting, failed_on, routing_from)
        raise AssertionError("the last send raises")

    async def _send(
        self,
        work: Work,
        token_ids: np.ndarray,
        waiting: asyncio.Timeout,
        failed_on: set[VllmClient],
        routing_from: int | None,
    ) -> Sampled:
        """One send; the limit of `waiting` is lifted while a server has the request, and ends it itself."""
        n_tokens = len(token_ids) + self.config.max_completion_tokens
        until = waiting.when()
        async with self.pool.lease(work.group, n_tokens, failed_on) as server:
            waiting.reschedule(None)
            cuts = self.pool.cuts(server)
            try:
                with span("generating", cause=server.url):
                    completion = await server.generate(
                        token_ids,
                        max_tokens=self.config.max_completion_tokens,
                        temperature=work.temperature,
                        seed=turn_seed(work.seed, len(token_ids)),
                        stop_token_ids=self.stop_token_ids,
                        timeout_s=self.timeout_s,
                        until=until,
                        routing_from=self._routing_start(token_ids, routing_from),
                    )
                versions = [version for _, version in completion.version_spans]
                await self.pool.vouch(server, versions, cuts)
            except TransientRequestError as error:
                failed_on.add(server)
                self.pool.report(server, error)
                waiting.reschedule(until)
                raise
            self.pool.answered(server)
        return Sampled(
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            version_spans=self._versions(completion),
            finish_reason=completion.finish_reason,
            server=server.url,
            routed_experts=None
            if routing_from is None
            else _routing(completion, token_ids, routing_from, server),
        )

    def _routing_start(self, token_ids: np.ndarray, routing_from: int | None) -> int:
        """From which token on a server is to return routed experts; where nobody wants them, of as few as it can."""
        if routing_from is None and self.config.keep_routing:
            return len(token_ids)
        return routing_from or 0

    def _versions(self, completion: Completion) -> list[tuple[int, int]]:
        spans = [(start, PolicyVersion.parse(version)) for start, version in completion.version_spans]
        if strangers := {str(version) for _, version in spans if version.run != self.run}:
            raise RolloutError(
                f"a server answered with weights of another run: {', '.join(sorted(strangers))}"
            )
        return [(start, version.version) for start, version in spans]


def _routing(
    completion: Completion, token_ids: np.ndarray, routing_from: int, server: VllmClient
) -> np.ndarray | None:
    """The routed experts of an answer; None when it was cut before anything was computed.

    Raises:
        RolloutError: they are not those of the tokens that were asked for.
    """
    experts = completion.routed_experts
    n_expected = max(0, len(token_ids) + len(completion.token_ids) - 1 - routing_from)
    n_given = 0 if experts is None else len(experts)
    is_cut = completion.finish_reason == "abort" and n_given < n_expected
    if n_given != n_expected and not is_cut:
        raise RolloutError(
            f"{server.url} returned the routed experts of {n_given} tokens, expected are those of {n_expected}: was it "
            "started with --enable-return-routed-experts?"
        )
    return experts


def turn_seed(seed: int, n_tokens: int) -> int:
    """Seed of the turn that goes on from `n_tokens` tokens: another for each turn, or they would share their luck."""
    return (seed + n_tokens) % (1 << 63)
