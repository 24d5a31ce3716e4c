"""A trajectory, and trajectories as rows of the `rollouts` data set."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

import numpy as np

from tasks.rollout.environment import Example, Message
from tasks.rollout.state import NO_STATE, EpisodeState
from tasks.store.rows import Rows
from tasks.store.schemas import batch_of, ragged, schema_of

Status = Literal["complete", "truncated", "failed", "cancelled"]
NO_VERSION = -1


@dataclass(frozen=True, slots=True)
class Work:
    """One trajectory to be sampled.

    Attributes:
        trajectory_id: function of (run, group, sample, attempt).
        seed: of the sampler, 0 <= seed < 2**63.
        temperature: 0 is greedy.
        missing: why the environment could not give the problem; such a trajectory is a failed row.
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
    """One attempt at a problem, as it ended.

    Attributes:
        token_ids: [T] int32, prompt and completions and what the environment said between them.
        loss_mask: [T] bool, True on tokens that the policy sampled.
        logprobs: [T] float32 in nats, the sampler's; NaN where loss_mask is False.
        version_spans: (index into token_ids, policy version) where each span of one version begins.
        outcome: what the environment says of how the episode ended.
        routed_experts: [N, layers, experts a token] each; one after another those of the first tokens, T - 1 of them
            unless it failed: the last token was sampled, not computed. Empty when they are not kept.
        state: what the environment keeps of the episode, by column.
    """

    work: Work
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
class Draft:
    """The tokens of an episode while it is played; its arrays become those of the Trajectory."""

    messages: tuple[Message, ...] = ()
    parts: list[tuple[np.ndarray, np.ndarray | None]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    n_tokens: int = 0
    server: str = ""
    finish_reason: str = ""
    turns: int = 0
    generate_s: float = 0.0
    environment_s: float = 0.0
    keeps_routing: bool = False
    routed_experts: list[np.ndarray] = field(default_factory=list)
    n_routed: int = 0
    state: EpisodeState = NO_STATE

    def add_context(self, token_ids: np.ndarray) -> None:
        """Append tokens that the policy did not sample."""
        self.parts.append((token_ids, None))
        self.n_tokens += len(token_ids)

    def add_completion(
        self,
        token_ids: np.ndarray,
        logprobs: np.ndarray,
        spans: Sequence[tuple[int, int]],
        finish_reason: str,
    ) -> None:
        """Append sampled tokens; `spans` counts from the completion's first token."""
        self.spans += [(self.n_tokens + start, version) for start, version in spans]
        self.parts.append((token_ids, logprobs))
        self.n_tokens += len(token_ids)
        self.finish_reason = finish_reason
        self.turns += 1

    def add_routing(self, routed_experts: np.ndarray) -> None:
        """Append the routed experts of the tokens from number `n_routed` on, context and completion alike.

        Those of a turn's last token come with the next turn, whose prompt it is part of: every row comes once.
        """
        self.routed_experts.append(routed_experts)
        self.n_routed += len(routed_experts)

    @property
    def last_token(self) -> int:
        """The last token so far; -1 when there is none."""
        return int(self.parts[-1][0][-1]) if self.parts and len(self.parts[-1][0]) else -1

    def token_ids(self) -> np.ndarray:
        """[T] int32."""
        return np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in self.parts)]).astype(np.int32)

    def loss_mask(self) -> np.ndarray:
        """[T] bool."""
        masks = (np.full(len(ids), logprobs is not None) for ids, logprobs in self.parts)
        return np.concatenate([np.empty(0, bool), *masks])

    def logprobs(self) -> np.ndarray:
        """[T] float32, NaN on context."""
        each = (np.full(len(ids), np.nan) if logprobs is None else logprobs for ids, logprobs in self.parts)
        return np.concatenate([np.empty(0), *each]).astype(np.float32)

    def ended(
        self,
        work: Work,
        status: Status,
        *,
        started_at: datetime,
        duration_s: float,
        queue_s: float,
        outcome: Mapping[str, object],
        error_type: str,
        error: str,
    ) -> Trajectory:
        """The episode as it ended, with the tokens it has."""
        return Trajectory(
            work=work,
            status=status,
            messages=self.messages,
            token_ids=self.token_ids(),
            loss_mask=self.loss_mask(),
            logprobs=self.logprobs(),
            version_spans=tuple(self.spans),
            finish_reason=self.finish_reason,
            turns=self.turns,
            server=self.server,
            started_at=started_at,
            duration_s=duration_s,
            generate_s=self.generate_s,
            environment_s=self.environment_s,
            queue_s=queue_s,
            outcome=outcome,
            error_type=error_type,
            error=error,
            routed_experts=tuple(self.routed_experts),
            state=self.state,
        )


def rollout_columns(run: str, step: int, env: str, trajectories: Sequence[Trajectory]) -> dict[str, object]:
    """The columns of the `rollouts` schema, one value a trajectory."""
    rows = trajectories
    schema = schema_of("rollouts")
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
        "token_ids": ragged([row.token_ids for row in rows], schema.field("token_ids").type),
        "loss_mask": ragged([row.loss_mask for row in rows], schema.field("loss_mask").type),
        "logprobs": ragged([row.logprobs for row in rows], schema.field("logprobs").type),
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
    """Trajectories as rows of the `rollouts` data set."""
    return batch_of("rollouts", rollout_columns(run, step, env, trajectories))
