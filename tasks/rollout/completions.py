"""Sample completions from the pool of vLLM servers, with retries on other servers."""

import asyncio
from dataclasses import dataclass, field

import numpy as np

from rollmill.tasks.errors import RolloutError, TransientRequestError
from rollmill.tasks.observe.retries import Retries
from rollmill.tasks.observe.spans import span
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.episode import SampledTokens
from rollmill.tasks.rollout.trajectory import TrajectoryRequest
from rollmill.tasks.serve.policy_version import PolicyVersion
from rollmill.tasks.serve.responses import Completion
from rollmill.tasks.serve.server_pool import ServerPool
from rollmill.tasks.serve.vllm_client import VllmClient

ATTEMPTS = 4
"""Sends of one request, the first one included: with backoff some seconds, in which a server restarts its frontend."""
BACKOFF_S = 0.5
"""Seconds before the second send; doubled each time, with jitter."""


@dataclass(frozen=True, slots=True)
class PoolSampler:
    """Samples completions from a pool of servers; requests of one group go to one server, for its prefix cache.

    Attributes:
        run: id of the run; a response from weights of another run is an error.
        timeout_s: timeout in seconds of one request.
        stop_token_ids: tokens that end a turn, in addition to the end of sequence.
        backoff_s: seconds before the first retry.
    """

    pool: ServerPool
    config: RolloutConfig
    run: str
    timeout_s: float
    stop_token_ids: tuple[int, ...] = ()
    backoff_s: float = BACKOFF_S
    _further: dict[str, object] = field(init=False)

    def __post_init__(self) -> None:
        # Once, and not for each request.
        object.__setattr__(self, "_further", self.config.sampling.parameters())

    async def sample(
        self, work: TrajectoryRequest, token_ids: np.ndarray, until: float, routing_from: int | None = None
    ) -> SampledTokens:
        """Sample one completion of `token_ids` ([T] int32), retrying transient errors, on other servers first.

        Args and errors are those of `Sampler.sample`.
        """
        sends = Retries(
            TransientRequestError,
            attempts=ATTEMPTS,
            backoff_s=self.backoff_s,
            longest_s=self.timeout_s,
        )
        n_tokens = len(token_ids) + self.config.max_completion_tokens
        failed_on: set[VllmClient] = set()
        async with asyncio.timeout_at(until) as waiting:
            async for send in sends:
                with send:
                    async with self.pool.lease(work.group, n_tokens, failed_on) as server:
                        # A server that has the request ends it itself.
                        waiting.reschedule(None)
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
                                    further=self._further,
                                )
                            versions = [version for _, version in completion.version_spans]
                            await self.pool.require_verified(server, versions)
                        except TransientRequestError as error:
                            # The next attempt prefers the other servers.
                            failed_on.add(server)
                            self.pool.note_failure(server, error)
                            waiting.reschedule(until)
                            raise
                        self.pool.note_success(server)
                    return self._read_sampled_tokens(completion, token_ids, routing_from, server)
        raise AssertionError("the last send raises")

    def _read_sampled_tokens(
        self, completion: Completion, token_ids: np.ndarray, routing_from: int | None, server: VllmClient
    ) -> SampledTokens:
        return SampledTokens(
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
        """Return the index of the first token whose routed experts the server must return.

        It is the last possible one if routing is kept but the caller needs none.
        """
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
    """Return the routed experts in a response; None if it was cut off before the server computed any.

    Raises:
        RolloutError: their number is not that of the requested tokens.
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
    """Return the sampling seed of a turn, derived from the trajectory's seed and the number of tokens before the turn."""
    return (seed + n_tokens) % (1 << 63)
