"""Play one episode against a sampler; whatever happens to it, a Trajectory comes back."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

import numpy as np

from tasks.errors import EpisodeError, ServiceError
from tasks.observe.spans import span
from tasks.rollout.environment import Environment, Episode, Message
from tasks.rollout.foreign import checked_messages, checked_outcome, described, foreign_code
from tasks.rollout.state import state_of
from tasks.rollout.tokens import ChatTokenizer
from tasks.rollout.trajectory import Draft, Status, Trajectory, Work

ABORTED = "abort"
CUT = "Deadline"
"""Type of error of what a deadline cut."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One completion.

    Attributes:
        token_ids: [T] int32, an end-of-sequence token included.
        logprobs: [T] float32, nats, of the tokens as sampled.
        version_spans: (index into token_ids, policy version) where each span of one version begins.
        finish_reason: stop | length | abort; abort: cut at `until`, or by the server.
        server: address of the server.
        routed_experts: [N, layers, experts a token] of the tokens, those before included, from `routing_from` to the
            last but one; None when they were not asked for.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    version_spans: Sequence[tuple[int, int]]
    finish_reason: str
    server: str
    routed_experts: np.ndarray | None = None


class Sampler(Protocol):
    """Continues a sequence of token ids; sends transient errors again itself."""

    async def sample(
        self, work: Work, token_ids: np.ndarray, until: float, routing_from: int | None = None
    ) -> Sampled:
        """Continue `token_ids` ([T] int32) at most until a moment of the event loop's clock, in seconds.

        What was sampled by then comes back with finish_reason abort; and when `routing_from` is given, with the routed
        experts of all tokens from that number on.

        Raises:
            RequestError: no server gave an answer.
            TimeoutError: the moment came before any server had the request.
            ServiceError: no server is left and none can be brought back.
        """


@dataclass(frozen=True, slots=True)
class Deadline:
    """When an episode is cut.

    Attributes:
        at: moment of the event loop's clock, in seconds.
        setting: what set it, for the error.
    """

    at: float
    setting: str


@dataclass(frozen=True, slots=True)
class Player:
    """Plays episodes of one environment.

    Attributes:
        max_tokens: longest sequence, prompt included; an episode that reaches it is truncated.
        timeout_s: seconds one trajectory may take.
        cut_grace_s: seconds that a sampler has to return what it has when its time is over.
    """

    environment: Environment
    tokenizer: ChatTokenizer
    sampler: Sampler
    max_tokens: int
    timeout_s: float
    cut_grace_s: float = 5.0

    async def play(
        self,
        work: Work,
        *,
        queue_s: float = 0.0,
        group_deadline: Deadline | None = None,
        keeps_routing: bool = False,
    ) -> Trajectory:
        """Play one episode; what fails is a failed Trajectory, what a deadline cuts a cancelled one, with its tokens.

        Args:
            work: what to play.
            queue_s: seconds it waited before.
            group_deadline: when its group is cut; it is cut itself `timeout_s` from now at the latest.
            keeps_routing: True to ask for the routed experts.

        Raises:
            ServiceError: no server is left: that ends the run, not the trajectory.
        """
        draft = Draft(keeps_routing=keeps_routing)
        started, started_at = time.perf_counter(), datetime.now(UTC)
        own = Deadline(
            asyncio.get_running_loop().time() + self.timeout_s,
            f"rollout.trajectory_timeout_s = {self.timeout_s:g} s",
        )
        deadline = own if group_deadline is None or own.at <= group_deadline.at else group_deadline
        status: Status = "failed"
        outcome: Mapping[str, object] = {}
        error_type = error = ""
        try:
            status, outcome = await self._episode(work, draft, deadline)
        except _CutError:
            status, error_type = "cancelled", CUT
            error = f"cut after {time.perf_counter() - started:.1f} s: {deadline.setting}"
        except ServiceError:
            raise
        except Exception as raised:  # noqa: BLE001 - environments are foreign code: a bad rollout is data
            error_type, error = described(raised)
        return draft.ended(
            work,
            status,
            started_at=started_at,
            duration_s=time.perf_counter() - started,
            queue_s=queue_s,
            outcome=outcome,
            error_type=error_type,
            error=error,
        )

    def not_begun(self, work: Work, queue_s: float, deadline: Deadline) -> Trajectory:
        """A trajectory whose deadline came while it waited for a slot: cancelled, without tokens."""
        return Draft().ended(
            work,
            "cancelled",
            started_at=datetime.now(UTC),
            duration_s=0.0,
            queue_s=queue_s,
            outcome={},
            error_type=CUT,
            error=f"cut before it began: {deadline.setting}",
        )

    async def _episode(
        self, work: Work, draft: Draft, deadline: Deadline
    ) -> tuple[Status, Mapping[str, object]]:
        """Status and outcome; raises _CutError at the deadline, and whatever environment or sampler raise."""
        if work.missing is not None:
            raise work.missing
        with foreign_code():
            episode = self.environment.episode(work.example, work.seed)
        try:
            async with asyncio.timeout_at(deadline.at + self.cut_grace_s) as limit:
                status = await self._turns(episode, work, draft, deadline)
        except TimeoutError:
            await self._abandon(episode, draft)
            if limit.expired():
                raise _CutError from None
            raise
        except BaseException:
            await self._abandon(episode, draft)
            raise
        return status, await self._closed(episode, draft)

    async def _closed(self, episode: Episode, draft: Draft) -> Mapping[str, object]:
        """Close an episode; returns what the environment says of its end, and notes what it keeps of it."""
        try:
            async with asyncio.timeout(self.cut_grace_s) as limit:
                with foreign_code(), span("environment"):
                    outcome = checked_outcome(await episode.close())
                draft.state = state_of(self.environment, episode)
                return outcome
        except TimeoutError:
            if limit.expired():
                raise EpisodeError(f"environment {self.environment.name} did not close its episode") from None
            raise

    async def _abandon(self, episode: Episode, draft: Draft) -> None:
        """Close an episode that failed or was cut: that is what is told, not how its closing went."""
        with suppress(Exception):
            await self._closed(episode, draft)

    async def _turns(self, episode: Episode, work: Work, draft: Draft, deadline: Deadline) -> Status:
        tools = self.environment.tools
        draft.messages = await self._reply(episode, draft, deadline)
        opening = self.tokenizer.encode(draft.messages, tools)
        if len(opening) >= self.max_tokens:
            text = f"the opening has {len(opening)} tokens, and an episode is below {self.max_tokens}"
            raise EpisodeError(f"{text} (serve.max_model_len)")
        draft.add_context(opening)
        while draft.n_tokens < self.max_tokens:
            await self._complete(work, draft, deadline)
            if draft.finish_reason != "stop":
                return "truncated"
            reply = await self._reply(episode, draft, deadline)
            if not reply:
                return "complete"
            is_ended = draft.last_token in self.tokenizer.eos_ids
            added = self.tokenizer.encode_reply(draft.messages, reply, tools, is_ended=is_ended)
            draft.messages += reply
            if draft.n_tokens + len(added) >= self.max_tokens:
                return "truncated"  # no token could follow, so these are no part of what is trained on
            draft.add_context(added)
        return "truncated"

    async def _reply(self, episode: Episode, draft: Draft, deadline: Deadline) -> tuple[Message, ...]:
        turn = span("environment")
        try:
            with turn:
                async with asyncio.timeout_at(deadline.at) as limit:
                    with foreign_code():
                        return checked_messages(await episode.reply(draft.messages))
        except TimeoutError:
            if limit.expired():
                raise _CutError from None
            raise
        finally:
            draft.environment_s += turn.duration_s

    async def _complete(self, work: Work, draft: Draft, deadline: Deadline) -> None:
        started = time.perf_counter()
        try:
            routing = {"routing_from": draft.n_routed} if draft.keeps_routing else {}
            sampled = await self.sampler.sample(work, draft.token_ids(), deadline.at, **routing)
        except TimeoutError:
            raise _CutError from None
        finally:
            draft.generate_s += time.perf_counter() - started
        draft.server = sampled.server
        draft.add_completion(
            sampled.token_ids, sampled.logprobs, sampled.version_spans, sampled.finish_reason
        )
        if sampled.routed_experts is not None:
            draft.add_routing(sampled.routed_experts)
        draft.messages += (Message("assistant", self.tokenizer.decode(sampled.token_ids)),)
        if sampled.finish_reason == ABORTED:
            if asyncio.get_running_loop().time() >= deadline.at:
                raise _CutError
            raise EpisodeError(f"server {sampled.server} aborted the request")


class _CutError(Exception):
    """The episode's deadline has come."""
