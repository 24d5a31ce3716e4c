"""A trajectory while it is requested, built and finished, and its row of the `rollouts` data set."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from rollmill.tasks.rollout.chat_tokenizer import Tools
from rollmill.tasks.rollout.environment import Example, Message, TokenCounts
from rollmill.tasks.rollout.environment_calls import NO_STATE, EpisodeState
from rollmill.tasks.rollout.segment_builder import Continuation, SegmentBuilder
from rollmill.tasks.store.rows import Rows
from rollmill.tasks.store.schemas import dataset_schema, make_batch, ragged_array
from rollmill.tasks.store.segments import LINEAR, SEGMENT_COLUMNS, Segment, Segments

Status = Literal["complete", "truncated", "failed", "cancelled"]
NO_VERSION = -1


@dataclass(frozen=True, slots=True)
class TrajectoryRequest:
    """Request to sample one trajectory: its ids, problem, seed and temperature.

    Attributes:
        trajectory_id: function of (run, group, sample, attempt).
        seed: sampling seed, 0 <= seed < 2**63.
        temperature: 0 is greedy.
        missing: why the environment could not give the problem; such a trajectory becomes a failed row.
    """

    trajectory_id: str
    group: int
    sample: int
    attempt: int
    example: Example
    seed: int
    temperature: float
    missing: Exception | None = None


class Turn(NamedTuple):
    """One completion of an episode.

    Attributes:
        start: index of its first token in the trajectory's token_ids.
        n_tokens: sampled tokens.
        message: index into the trajectory's messages of what was said.
    """

    start: int
    n_tokens: int
    message: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished attempt at a problem.

    Attributes:
        messages: of all segments, in the order in which they were said.
        token_ids: [T] int32, prompt, completions, and the environment's messages between them; own tokens of each segment in turn.
        loss_mask: [T] bool, True on tokens that the policy sampled.
        logprobs: [T] float32 in nats, from the sampler; NaN where loss_mask is False.
        version_spans: (index into token_ids, policy version) at which each span of one version begins.
        turns: completions in the order in which they were sampled.
        outcome: the environment's report at the end of the episode.
        routed_experts: arrays [N, layers, experts a token] that concatenate to T - 1 tokens (fewer if it failed): the last
            token was sampled, not computed, and so was the last token of each segment, which has zeros. Empty if they are not kept.
        state: state columns of the environment.
        segments: which tokens and messages of which segment they continue.
        message_segments: number of each message's segment; empty for one segment.
    """

    work: TrajectoryRequest
    status: Status
    messages: tuple[Message, ...]
    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    version_spans: tuple[tuple[int, int], ...]
    finish_reason: str
    turns: tuple["Turn", ...]
    server: str
    started_at: datetime
    duration_s: float
    generate_s: float
    environment_s: float
    queue_s: float
    outcome: Mapping[str, object] = field(default_factory=dict)
    error_type: str = ""
    error: str = ""
    routed_experts: tuple[np.ndarray, ...] = ()
    state: EpisodeState = NO_STATE
    segments: Segments = LINEAR
    message_segments: tuple[int, ...] = ()


@dataclass(slots=True)
class TrajectoryBuilder:
    """Collects the tokens of an episode in progress, and builds the Trajectory from them.

    Attributes:
        segments: those that were begun.
        segment: the one that the policy continues next.
        number: its number.
        said: (number of its segment, message) of each message, in the order in which they were said.
        turns: (number of its segment, completion), the completion's start as an index into the segment's own tokens.
    """

    work: TrajectoryRequest
    queue_s: float = 0.0
    keeps_routing: bool = False
    segment: SegmentBuilder = field(default_factory=SegmentBuilder)
    segments: list[SegmentBuilder] = field(init=False)
    said: list[tuple[int, Message]] = field(default_factory=list)
    server: str = ""
    finish_reason: str = ""
    turns: list[tuple[int, Turn]] = field(default_factory=list)
    generate_s: float = 0.0
    environment_s: float = 0.0
    outcome: Mapping[str, object] = field(default_factory=dict)
    error_type: str = ""
    error: str = ""
    state: EpisodeState = NO_STATE
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    number: int = 0
    _started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.segments = [self.segment]

    @property
    def elapsed_s(self) -> float:
        """Seconds since the episode began."""
        return time.perf_counter() - self._started

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation that the policy continues next."""
        return self.segment.messages

    @property
    def n_tokens(self) -> int:
        """Tokens of the sequence that the policy continues next."""
        return self.segment.n_tokens

    @property
    def n_stored(self) -> int:
        """Tokens of all segments; for one segment those of its sequence."""
        return sum(each.n_own for each in self.segments)

    @property
    def last_counts(self) -> TokenCounts | None:
        """Token counts of the last completion, until something is added after it; None if there is no completion."""
        if not self.turns:
            return None
        n_completion = self.turns[-1][1].n_tokens
        return TokenCounts(self.n_tokens - n_completion, n_completion)

    @property
    def last_token(self) -> int:
        """Id of the last token so far; -1 if there is none."""
        parts = self.segment.parts
        return int(parts[-1][0][-1]) if parts and len(parts[-1][0]) else -1

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Append messages to the conversation."""
        self.segment.messages += tuple(messages)
        self.said += [(self.number, each) for each in messages]

    def continue_at(self, found: Continuation, messages: Sequence[Message], tools: Tools) -> None:
        """Continue a segment, or begin a new one, with the conversation `messages` and `tools`; its new tokens are context."""
        self.number = found.segment
        if found.segment == len(self.segments):
            parent = self.segments[found.parent] if found.n_prefix else SegmentBuilder()
            self.segments.append(
                SegmentBuilder(
                    found.parent,
                    parent.sequence()[: found.n_prefix],
                    found.n_prefix_messages,
                    parent.messages[: found.n_prefix_messages],
                    n_tokens=found.n_prefix,
                    n_routed=found.n_prefix,
                )
            )
        self.segment = self.segments[found.segment]
        self.segment.tools = tools
        self.add_messages(messages[found.n_prefix_messages :])
        if len(found.added):
            self.add_context(found.added)

    def add_context(self, token_ids: np.ndarray) -> None:
        """Append tokens that the policy did not sample, such as the prompt."""
        self.segment.parts.append((token_ids, None))
        self.segment.n_tokens += len(token_ids)

    def add_completion(
        self,
        token_ids: np.ndarray,
        logprobs: np.ndarray,
        spans: Sequence[tuple[int, int]],
        finish_reason: str,
        text: str = "",
    ) -> None:
        """Append a sampled completion; `spans` are (index into the completion, policy version) for each span of one version.

        `text` is what the policy said by it.
        """
        segment = self.segment
        self.turns.append((self.number, Turn(segment.n_own, len(token_ids), len(self.said))))
        segment.spans += [(segment.n_own + start, version) for start, version in spans]
        segment.parts.append((token_ids, logprobs))
        segment.n_tokens += len(token_ids)
        self.add_messages((Message("assistant", text),))
        segment.turns.append((len(segment.messages), segment.n_tokens))
        self.finish_reason = finish_reason

    def add_routing(self, routed_experts: np.ndarray) -> None:
        """Append routed experts, [N, layers, experts a token], of the N tokens of the segment from index `n_routed` on.

        The tokens are of context and completion. The experts of a turn's last token come with the next turn, whose prompt has it.
        """
        self.segment.routed_experts.append(routed_experts)
        self.segment.n_routed += len(routed_experts)

    def build(self, status: Status) -> Trajectory:
        """Return the Trajectory of the episode that ends now, with the tokens added so far."""
        parts = [part for each in self.segments for part in each.parts]
        starts = [0, *accumulate(each.n_own for each in self.segments)]
        masks = (np.full(len(ids), logprobs is not None) for ids, logprobs in parts)
        logprobs = (np.full(len(ids), np.nan) if each is None else each for ids, each in parts)
        n_segments = len(self.segments)
        return Trajectory(
            work=self.work,
            status=status,
            messages=tuple(message for _, message in self.said),
            token_ids=np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in parts)]).astype(np.int32),
            loss_mask=np.concatenate([np.empty(0, bool), *masks]),
            logprobs=np.concatenate([np.empty(0), *logprobs]).astype(np.float32),
            version_spans=tuple(
                (start + at, version)
                for start, each in zip(starts, self.segments, strict=False)
                for at, version in each.spans
            ),
            finish_reason=self.finish_reason,
            turns=tuple(each._replace(start=starts[of] + each.start) for of, each in self.turns),
            server=self.server,
            started_at=self.started_at,
            duration_s=self.elapsed_s,
            generate_s=self.generate_s,
            environment_s=self.environment_s,
            queue_s=self.queue_s,
            outcome=self.outcome,
            error_type=self.error_type,
            error=self.error,
            routed_experts=tuple(
                array
                for number, each in enumerate(self.segments, start=1)
                for array in each.own_routing(is_last=number == n_segments)
            ),
            state=self.state,
            segments=LINEAR
            if n_segments == 1
            else tuple(
                Segment(start, each.parent, len(each.prefix), each.n_prefix_messages)
                for start, each in zip(starts, self.segments, strict=False)
            ),
            message_segments=() if n_segments == 1 else tuple(number for number, _ in self.said),
        )


def rollout_columns(run: str, step: int, env: str, trajectories: Sequence[Trajectory]) -> dict[str, object]:
    """Return the columns of the data set `rollouts` by name, with one value for each trajectory."""
    rows = trajectories
    schema = dataset_schema("rollouts")
    versions = [[version for _, version in row.version_spans] or [NO_VERSION] for row in rows]
    completion_tokens = [int(row.loss_mask.sum()) for row in rows]
    return {
        "run": [run] * len(rows),
        "step": [step] * len(rows),
        "group": [row.work.group for row in rows],
        "sample": [row.work.sample for row in rows],
        "attempt": [row.work.attempt for row in rows],
        "trajectory_id": [row.work.trajectory_id for row in rows],
        "env": [env] * len(rows),
        "example_id": [row.work.example.example_id for row in rows],
        "example": [json.dumps(dict(row.work.example.content)) for row in rows],
        "temperature": [row.work.temperature for row in rows],
        "sampling_seed": [row.work.seed for row in rows],
        "policy_version_first": [each[0] for each in versions],
        # A later segment's tokens may be older than what an earlier one was continued by.
        "policy_version_last": [
            each[-1] if len(row.segments) == 1 else max(each)
            for row, each in zip(rows, versions, strict=True)
        ],
        "version_span_starts": [[start for start, _ in row.version_spans] for row in rows],
        "version_span_versions": [[version for _, version in row.version_spans] for row in rows],
        "messages": [json.dumps([message.as_json() for message in row.messages]) for row in rows],
        "message_segments": [list(row.message_segments) for row in rows],
        **{
            name: [[segment[place] for segment in row.segments] for row in rows]
            for place, name in enumerate(SEGMENT_COLUMNS)
        },
        "outcome": [json.dumps(dict(row.outcome)) for row in rows],
        "token_ids": ragged_array([row.token_ids for row in rows], schema.field("token_ids").type),
        "loss_mask": ragged_array([row.loss_mask for row in rows], schema.field("loss_mask").type),
        "logprobs": ragged_array([row.logprobs for row in rows], schema.field("logprobs").type),
        "n_prompt_tokens": [_prompt_length(row.loss_mask) for row in rows],
        "n_completion_tokens": completion_tokens,
        "turns": [len(row.turns) for row in rows],
        "turn_starts": [[turn.start for turn in row.turns] for row in rows],
        "turn_tokens": [[turn.n_tokens for turn in row.turns] for row in rows],
        "turn_messages": [[turn.message for turn in row.turns] for row in rows],
    } | {name: [getattr(row, name) for row in rows] for name in _PLAIN_COLUMNS}


_PLAIN_COLUMNS = (
    "status",
    "error_type",
    "error",
    "finish_reason",
    "server",
    "started_at",
    "duration_s",
    "generate_s",
    "environment_s",
    "queue_s",
)


def _prompt_length(loss_mask: np.ndarray) -> int:
    return int(loss_mask.argmax()) if loss_mask.any() else len(loss_mask)


def rollout_rows(run: str, step: int, env: str, trajectories: Sequence[Trajectory]) -> Rows:
    """Convert trajectories to rows of the `rollouts` data set."""
    return make_batch("rollouts", rollout_columns(run, step, env, trajectories))
