"""Play one episode against a sampler; every outcome becomes a Trajectory."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from rollmill.tasks.errors import EpisodeError, ServiceError, WorkerKilledError, describe_error
from rollmill.tasks.observe.spans import span
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer, Tools
from rollmill.tasks.rollout.environment import Conversation, Environment, Episode, Message
from rollmill.tasks.rollout.environment_calls import (
    check_opening,
    check_outcome,
    check_reply,
    guard_environment_code,
    read_episode_state,
    report_counts,
    report_cut,
)
from rollmill.tasks.rollout.prompt_limit import PromptLimit
from rollmill.tasks.rollout.segment_builder import NO_LIMIT, RowLimit, find_continuation
from rollmill.tasks.rollout.trajectory import Status, Trajectory, TrajectoryBuilder, TrajectoryRequest

ABORTED = "abort"
DEADLINE = "Deadline"
"""Type of error of what a deadline cut."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One completion that a sampler returned: tokens, log-probabilities, and the policy versions that sampled them.

    Attributes:
        token_ids: [T] int32, including an end-of-sequence token.
        logprobs: [T] float32, nats, of the tokens as sampled.
        version_spans: (index into token_ids, policy version) at which each span of one version begins.
        finish_reason: stop | length | abort; abort: cut at the deadline, or by the server.
        server: address of the server.
        routed_experts: [N, layers, experts a token] of the tokens from `routing_from` to the last but one, earlier context
            included; None if not requested.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    version_spans: Sequence[tuple[int, int]]
    finish_reason: str
    server: str
    routed_experts: np.ndarray | None = None


class Sampler(Protocol):
    """Samples continuations of token sequences from the policy; retries transient errors."""

    async def sample(
        self, work: TrajectoryRequest, token_ids: np.ndarray, until: float, routing_from: int | None = None
    ) -> SampledTokens:
        """Sample a continuation of `token_ids` ([T] int32), cut at `until`, a time of the event loop's clock in seconds.

        What was sampled by then is returned with finish_reason abort. With `routing_from`, the result has the routed experts of all
        tokens from that index on.

        Raises:
            RequestError: no server answered.
            TimeoutError: the deadline came before any server had the request.
            ServiceError: no server is left and none can be restarted.
        """


@dataclass(frozen=True, slots=True)
class Deadline:
    """Time at which an episode is cut, and the setting that determines this time.

    Attributes:
        at: time of the event loop's clock in seconds.
        setting: the setting that determines it, for the error.
    """

    at: float
    setting: str


@dataclass(frozen=True, slots=True)
class EpisodePlayer:
    """Runs one trajectory at a time, policy against environment, and returns it with its tokens and status.

    Attributes:
        max_tokens: longest sequence, prompt included; an episode that reaches it is truncated.
        timeout_s: time limit of a trajectory in seconds.
        cut_grace_s: seconds after the deadline in which a sampler must return what it has.
        row_limit: what the trainer computes at once of an episode of several segments.
        prompt_limit: of openings; None: they are shorter than `max_tokens`.
    """

    environment: Environment
    tokenizer: ChatTokenizer
    sampler: Sampler
    max_tokens: int
    timeout_s: float
    cut_grace_s: float = 5.0
    row_limit: RowLimit = NO_LIMIT
    prompt_limit: PromptLimit | None = None

    async def play(
        self,
        work: TrajectoryRequest,
        *,
        queue_s: float = 0.0,
        group_deadline: Deadline | None = None,
        keeps_routing: bool = False,
    ) -> Trajectory:
        """Play one episode and return its Trajectory: failed after an error, cancelled with its tokens at a deadline.

        An earlier deadline than that of the group, `timeout_s` from now, takes precedence. `queue_s` is how long the trajectory
        waited before it began, in seconds. If the environment's worker is killed, the episode is played once more, with the same
        seed: the worker may have died of another episode's memory.

        Raises:
            ServiceError: no server is left; this ends the run, not only the trajectory.
        """
        own = Deadline(
            asyncio.get_running_loop().time() + self.timeout_s,
            f"rollout.trajectory_timeout_s = {self.timeout_s:g} s",
        )
        deadline = own if group_deadline is None or own.at <= group_deadline.at else group_deadline
        try:
            return await self._play_once(TrajectoryBuilder(work, queue_s, keeps_routing), deadline)
        except WorkerKilledError:
            again = TrajectoryBuilder(work, queue_s, keeps_routing)
            return await self._play_once(again, deadline, is_last=True)

    async def _play_once(
        self, draft: TrajectoryBuilder, deadline: Deadline, *, is_last: bool = False
    ) -> Trajectory:
        """Play the episode of `draft` and return its Trajectory.

        Raises:
            ServiceError: no server is left.
            WorkerKilledError: the environment's worker was killed; not if `is_last`.
        """
        status: Status = "failed"
        try:
            status = await self._episode(draft, deadline)
        except _DeadlineError:
            status, draft.error_type = "cancelled", DEADLINE
            draft.error = f"cut after {draft.elapsed_s:.1f} s: {deadline.setting}"
        except ServiceError:
            # No server is left: every further trajectory would fail too.
            raise
        except WorkerKilledError as raised:
            if not is_last:
                raise
            draft.error_type, draft.error = describe_error(raised)
        except Exception as raised:  # noqa: BLE001 - environments are foreign code: a bad rollout is data
            draft.error_type, draft.error = describe_error(raised)
        return draft.build(status)

    async def _episode(self, draft: TrajectoryBuilder, deadline: Deadline) -> Status:
        """Play the turns of an episode, close it, and return its status; `draft` gets its outcome.

        Raises:
            _DeadlineError: the deadline came first.
            Exception: whatever the environment or the sampler raises.
        """
        work = draft.work
        if work.missing is not None:
            raise work.missing
        with guard_environment_code():
            episode = self.environment.episode(work.example, work.seed)
        try:
            # Server and environment are given the deadline itself; this later limit ends one that does not keep it.
            async with asyncio.timeout_at(deadline.at + self.cut_grace_s) as limit:
                status = await self._turns(episode, draft, deadline)
        except TimeoutError:
            await self._abandon(episode, draft)
            if limit.expired():
                raise _DeadlineError from None
            raise
        except BaseException:
            await self._abandon(episode, draft)
            raise
        draft.outcome = await self._close(episode, draft)
        return status

    async def _close(self, episode: Episode, draft: TrajectoryBuilder) -> Mapping[str, object]:
        """Close an episode and return its outcome; the episode's state is stored in `draft`.

        Raises:
            EpisodeError: the environment did not close it within `cut_grace_s`, or failed.
        """
        try:
            async with asyncio.timeout(self.cut_grace_s) as limit:
                with guard_environment_code(), span("environment"):
                    outcome = check_outcome(await episode.close())
                draft.state = read_episode_state(self.environment, episode)
                return outcome
        except TimeoutError:
            if limit.expired():
                raise EpisodeError(f"environment {self.environment.name} did not close its episode") from None
            raise

    async def _abandon(self, episode: Episode, draft: TrajectoryBuilder) -> None:
        """Close an episode that failed or was cut; errors of closing it are ignored, since the first error is reported."""
        with suppress(Exception):
            await self._close(episode, draft)

    async def _turns(self, episode: Episode, draft: TrajectoryBuilder, deadline: Deadline) -> Status:
        opening = check_opening(await self._reply(episode, draft, deadline), self.environment)
        draft.segment.tools = opening.tools or ()
        draft.add_messages(opening.messages)
        limit = self.prompt_limit or PromptLimit.below(self.max_tokens)
        draft.add_context(limit.fit(self.tokenizer.encode(draft.messages, draft.segment.tools)))
        while draft.n_tokens < self.max_tokens:
            work, tokens = _describe_next(draft)
            with _measure_sampling(draft):
                routing = {"routing_from": draft.segment.n_routed} if draft.keeps_routing else {}
                sampled = await self.sampler.sample(work, tokens, deadline.at, **routing)
            self._add_completion(sampled, draft, deadline)
            if draft.finish_reason != "stop":
                report_cut(episode, draft.messages[-1], draft.last_counts)
                return "truncated"
            reply = await self._reply(episode, draft, deadline)
            if not reply:
                return "complete"
            if not self._continue(draft, reply):
                return "truncated"
        return "truncated"

    def _continue(self, draft: TrajectoryBuilder, reply: tuple[Message, ...] | Conversation) -> bool:
        """Add the environment's reply to `draft`, or replace its conversation; False, without its tokens, if none could follow them."""
        if isinstance(reply, Conversation):
            tools = self._find_tools(reply)
            found = find_continuation(self.tokenizer, draft.segments, reply.messages, tools)
            n_tokens = found.n_prefix + len(found.added)
            if n_tokens >= self.max_tokens or not self.row_limit.allows(
                draft.segments, found.segment, n_tokens, len(found.added)
            ):
                return False
            draft.continue_at(found, reply.messages, tools)
            return True
        tools, last = draft.segment.tools, draft.last_token
        added = self.tokenizer.encode_reply(draft.messages, reply, tools, last_token=last)
        draft.add_messages(reply)
        if draft.n_tokens + len(added) >= self.max_tokens:
            # No token could follow, so these are no part of what is trained on.
            return False
        if not self.row_limit.allows(draft.segments, draft.number, draft.n_tokens + len(added), len(added)):
            return False
        draft.add_context(added)
        return True

    def _find_tools(self, reply: Conversation) -> Tools:
        return self.environment.tools if reply.tools is None else reply.tools

    async def _reply(
        self, episode: Episode, draft: TrajectoryBuilder, deadline: Deadline
    ) -> tuple[Message, ...] | Conversation:
        turn = span("environment")
        try:
            with turn:
                async with asyncio.timeout_at(deadline.at) as limit:
                    with guard_environment_code():
                        report_counts(episode, draft.last_counts)
                        return check_reply(await episode.reply(draft.messages))
        except TimeoutError:
            if limit.expired():
                raise _DeadlineError from None
            raise
        finally:
            draft.environment_s += turn.duration_s

    def _add_completion(self, sampled: SampledTokens, draft: TrajectoryBuilder, deadline: Deadline) -> None:
        """Append a completion and its decoded message to `draft`.

        Raises:
            _DeadlineError: the completion was cut at the deadline.
            EpisodeError: the server aborted it before the deadline.
        """
        draft.server = sampled.server
        said = self.tokenizer.decode(sampled.token_ids)
        draft.add_completion(
            sampled.token_ids, sampled.logprobs, sampled.version_spans, sampled.finish_reason, said
        )
        if sampled.routed_experts is not None:
            draft.add_routing(sampled.routed_experts)
        if sampled.finish_reason == ABORTED:
            if asyncio.get_running_loop().time() >= deadline.at:
                raise _DeadlineError
            raise EpisodeError(f"server {sampled.server} aborted the request")


def _describe_next(draft: TrajectoryBuilder) -> tuple[TrajectoryRequest, np.ndarray]:
    """Return what a completion of the present segment is sampled for, and the tokens before it ([T] int32)."""
    segment, work = draft.segment, draft.work
    if shift := draft.n_stored - segment.n_tokens:
        # Sampled again after the same tokens, it has another seed: no two turns are after equally many stored tokens.
        work = replace(work, seed=(work.seed + shift) % (1 << 63))
    return work, segment.sequence()


@contextmanager
def _measure_sampling(draft: TrajectoryBuilder) -> Iterator[None]:
    """Add the time within to `draft`; raise _DeadlineError for a request that its deadline ended."""
    started = time.perf_counter()
    try:
        yield
    except TimeoutError:
        raise _DeadlineError from None
    finally:
        draft.generate_s += time.perf_counter() - started


class _DeadlineError(Exception):
    """Raised when the deadline of an episode has passed."""
