"""A trajectory while it is requested, built and finished, and its row of the `rollouts` data set."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import numpy as np

from rollmill.tasks.rollout.environment import Example, Message
from rollmill.tasks.rollout.environment_calls import NO_STATE, EpisodeState
from rollmill.tasks.store.rows import Rows
from rollmill.tasks.store.schemas import dataset_schema, make_batch, ragged_array

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


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished attempt at a problem.

    Attributes:
        token_ids: [T] int32, prompt, completions, and the environment's messages between them.
        loss_mask: [T] bool, True on tokens that the policy sampled.
        logprobs: [T] float32 in nats, from the sampler; NaN where loss_mask is False.
        version_spans: (index into token_ids, policy version) at which each span of one version begins.
        outcome: the environment's report at the end of the episode.
        routed_experts: arrays [N, layers, experts a token] that concatenate to T - 1 tokens (fewer if it failed): the last
            token was sampled, not computed. Empty if they are not kept.
        state: state columns of the environment.
    """

    work: TrajectoryRequest
    status: Status
    messages: tuple[Message, ...]
    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    version_spans: tuple[tuple[int, int], ...]
    finish_reason: str
    turns: int
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


@dataclass(slots=True)
class TrajectoryBuilder:
    """Collects the tokens of an episode in progress, and builds the Trajectory from them."""

    work: TrajectoryRequest
    queue_s: float = 0.0
    keeps_routing: bool = False
    messages: tuple[Message, ...] = ()
    parts: list[tuple[np.ndarray, np.ndarray | None]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    n_tokens: int = 0
    server: str = ""
    finish_reason: str = ""
    turns: int = 0
    generate_s: float = 0.0
    environment_s: float = 0.0
    routed_experts: list[np.ndarray] = field(default_factory=list)
    n_routed: int = 0
    outcome: Mapping[str, object] = field(default_factory=dict)
    error_type: str = ""
    error: str = ""
    state: EpisodeState = NO_STATE
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    _started: float = field(default_factory=time.perf_counter)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the episode began."""
        return time.perf_counter() - self._started

    def add_context(self, token_ids: np.ndarray) -> None:
        """Append tokens that the policy did not sample, such as the prompt."""
        self.parts.append((token_ids, None))
        self.n_tokens += len(token_ids)

    def add_completion(
        self,
        token_ids: np.ndarray,
        logprobs: np.ndarray,
        spans: Sequence[tuple[int, int]],
        finish_reason: str,
    ) -> None:
        """Append a sampled completion; `spans` are (index into the completion, policy version) for each span of one version."""
        self.spans += [(self.n_tokens + start, version) for start, version in spans]
        self.parts.append((token_ids, logprobs))
        self.n_tokens += len(token_ids)
        self.finish_reason = finish_reason
        self.turns += 1

    def add_routing(self, routed_experts: np.ndarray) -> None:
        """Append routed experts, [N, layers, experts a token], of the N tokens from index `n_routed` on.

        The tokens are of context and completion. The experts of a turn's last token come with the next turn, whose prompt has it.
        """
        self.routed_experts.append(routed_experts)
        self.n_routed += len(routed_experts)

    @property
    def last_token(self) -> int:
        """Id of the last token so far; -1 if there is none."""
        return int(self.parts[-1][0][-1]) if self.parts and len(self.parts[-1][0]) else -1

    def token_ids(self) -> np.ndarray:
        """Return the ids of all tokens so far, context and completions: [T] int32."""
        return np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in self.parts)]).astype(np.int32)

    def loss_mask(self) -> np.ndarray:
        """Return [T] bool: True for tokens that the policy sampled."""
        masks = (np.full(len(ids), logprobs is not None) for ids, logprobs in self.parts)
        return np.concatenate([np.empty(0, bool), *masks])

    def logprobs(self) -> np.ndarray:
        """Return [T] float32: log-probabilities in nats that the server gave for sampled tokens, NaN for context."""
        each = (np.full(len(ids), np.nan) if logprobs is None else logprobs for ids, logprobs in self.parts)
        return np.concatenate([np.empty(0), *each]).astype(np.float32)

    def build(self, status: Status) -> Trajectory:
        """Return the Trajectory of the episode that ends now, with the tokens added so far."""
        return Trajectory(
            work=self.work,
            status=status,
            messages=self.messages,
            token_ids=self.token_ids(),
            loss_mask=self.loss_mask(),
            logprobs=self.logprobs(),
            version_spans=tuple(self.spans),
            finish_reason=self.finish_reason,
            turns=self.turns,
            server=self.server,
            started_at=self.started_at,
            duration_s=self.elapsed_s,
            generate_s=self.generate_s,
            environment_s=self.environment_s,
            queue_s=self.queue_s,
            outcome=self.outcome,
            error_type=self.error_type,
            error=self.error,
            routed_experts=tuple(self.routed_experts),
            state=self.state,
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
        "policy_version_last": [each[-1] for each in versions],
        "version_span_starts": [[start for start, _ in row.version_spans] for row in rows],
        "version_span_versions": [[version for _, version in row.version_spans] for row in rows],
        "messages": [json.dumps([message.as_json() for message in row.messages]) for row in rows],
        "outcome": [json.dumps(dict(row.outcome)) for row in rows],
        "token_ids": ragged_array([row.token_ids for row in rows], schema.field("token_ids").type),
        "loss_mask": ragged_array([row.loss_mask for row in rows], schema.field("loss_mask").type),
        "logprobs": ragged_array([row.logprobs for row in rows], schema.field("logprobs").type),
        "n_prompt_tokens": [_prompt_length(row.loss_mask) for row in rows],
        "n_completion_tokens": completion_tokens,
    } | {name: [getattr(row, name) for row in rows] for name in _PLAIN_COLUMNS}


_PLAIN_COLUMNS = (
    "status",
    "error_type",
    "error",
    "finish_reason",
    "turns",
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
