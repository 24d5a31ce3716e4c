"""Play one episode against a sampler; whatever happens to it, a Trajectory comes back."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

import numpy as np

from tasks.errors import ServiceError
from tasks.rollout.environment import Environment, Message
from tasks.rollout.tokens import ChatTokenizer
from tasks.rollout.trajectory import Draft, Status, Trajectory, Work


@dataclass(frozen=True, slots=True)
class Sampled:
    """One completion.

    Attributes:
        token_ids: [T] int32, an end-of-sequence token included.
        logprobs: [T] float32, nats, of the tokens as sampled.
        version_spans: (index into token_ids, policy version) where each span of one version begins.
        finish_reason: stop | length | abort.
        server: address of the server.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    version_spans: Sequence[tuple[int, int]]
    finish_reason: str
    server: str


class Sampler(Protocol):
    """Continues a sequence of token ids; sends transient errors again itself."""

    async def sample(self, work: Work, token_ids: np.ndarray) -> Sampled:
        """Continue `token_ids` ([T] int32).

        Raises:
            RequestError: no server gave an answer.
            ServiceError: no server is left and none can be brought back.
        """


@dataclass(frozen=True, slots=True)
class Player:
    """Plays episodes of one environment.

    Attributes:
        max_tokens: longest sequence, prompt included; an episode that reaches it is truncated.
        timeout_s: seconds one trajectory may take.
    """

    environment: Environment
    tokenizer: ChatTokenizer
    sampler: Sampler
    max_tokens: int
    timeout_s: float

    async def play(self, work: Work, *, queue_s: float = 0.0) -> Trajectory:
        """Play one episode; a failure of environment or sampler, or a deadline, is a failed Trajectory.

        Raises:
            ServiceError: no server is left: that ends the run, not the trajectory.
        """
        draft = Draft()
        started, started_at = time.perf_counter(), datetime.now(UTC)
        status: Status = "failed"
        error_type = error = ""
        try:
            async with asyncio.timeout(self.timeout_s):
                status = await self._turns(work, draft)
        except TimeoutError:
            error_type, error = (
                "TimeoutError",
                f"no end within rollout.trajectory_timeout_s = {self.timeout_s:g} s",
            )
        except ServiceError:
            raise
        except Exception as raised:  # noqa: BLE001 - environments are foreign code: a bad rollout is data
            error_type, error = type(raised).__name__, str(raised)
        return Trajectory(
            work=work,
            status=status,
            messages=draft.messages,
            token_ids=draft.token_ids(),
            loss_mask=draft.loss_mask(),
            logprobs=draft.logprobs(),
            version_spans=tuple(draft.spans),
            finish_reason=draft.finish_reason,
            turns=draft.turns,
            server=draft.server,
            started_at=started_at,
            duration_s=time.perf_counter() - started,
            generate_s=draft.generate_s,
            environment_s=draft.environment_s,
            queue_s=queue_s,
            error_type=error_type,
            error=error,
        )

    async def _turns(self, work: Work, draft: Draft) -> Status:
        draft.messages = await self._reply(work, draft)
        draft.add_context(self.tokenizer.encode(draft.messages))
        while draft.n_tokens < self.max_tokens:
            await self._complete(work, draft)
            if draft.finish_reason != "stop":
                return "truncated"
            reply = await self._reply(work, draft)
            if not reply:
                return "complete"
            draft.add_context(self.tokenizer.encode_reply(draft.messages, reply))
            draft.messages += reply
        return "truncated"

    async def _reply(self, work: Work, draft: Draft) -> tuple[Message, ...]:
        started = time.perf_counter()
        reply = tuple(await self.environment.reply(work.example, draft.messages))
        draft.environment_s += time.perf_counter() - started
        return reply

    async def _complete(self, work: Work, draft: Draft) -> None:
        started = time.perf_counter()
        sampled = await self.sampler.sample(work, draft.token_ids())
        draft.generate_s += time.perf_counter() - started
        draft.server = sampled.server
        draft.add_completion(
            sampled.token_ids, sampled.logprobs, sampled.version_spans, sampled.finish_reason
        )
        draft.messages += (Message("assistant", self.tokenizer.decode(sampled.token_ids)),)
