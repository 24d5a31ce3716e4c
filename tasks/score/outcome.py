"""What becomes of a group: its advantages, or the reason why it is not trained on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tasks.score.advantages import ADVANTAGES
from tasks.score.config import ScoreConfig
from tasks.store.rows import Rows
from tasks.store.schemas import batch_of

TOO_FEW_SURVIVORS = "too_few_survivors"
NO_REWARD_SPREAD = "no_reward_spread"


@dataclass(frozen=True, slots=True)
class Survivor:
    """A trajectory of a group that has tokens and a reward."""

    trajectory_id: str
    sample: int
    env: str
    n_tokens: int
    reward: float


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """A group when its last part came back.

    Attributes:
        reason: why it is out of the batch; empty when it is in.
        advantages: [len(survivors)] float32; all 0 when it is out.
    """

    group: int
    env: str
    expected: int
    survivors: tuple[Survivor, ...]
    reason: str
    advantages: np.ndarray


def survivors_of(rollouts: Rows, scores: Rows) -> tuple[Survivor, ...]:
    """The scored trajectories among a group's rows, by sample."""
    rewards = {
        row["trajectory_id"]: row["reward"]
        for row in scores.select(["trajectory_id", "status", "reward"]).to_pylist()
        if row["status"] == "scored"
    }
    columns = ["trajectory_id", "sample", "env", "n_completion_tokens"]
    rows = (row for row in rollouts.select(columns).to_pylist() if row["trajectory_id"] in rewards)
    found = (
        Survivor(
            trajectory_id=row["trajectory_id"],
            sample=row["sample"],
            env=row["env"],
            n_tokens=row["n_completion_tokens"],
            reward=rewards[row["trajectory_id"]],
        )
        for row in rows
    )
    return tuple(sorted(found, key=lambda survivor: survivor.sample))


def judge_group(
    config: ScoreConfig, *, group: int, env: str, expected: int, survivors: tuple[Survivor, ...]
) -> GroupOutcome:
    """Advantages over the survivors, or the reason to leave the group out.

    Example: four survivors with rewards 1, 0, 0, 1 and `advantage: mean` get .5, -.5, -.5, .5.
    """
    rewards = np.array([survivor.reward for survivor in survivors], np.float64)
    reason = ""
    if len(survivors) < config.min_group_size:
        reason = TOO_FEW_SURVIVORS
    elif np.ptp(rewards) == 0.0:
        reason = NO_REWARD_SPREAD
    advantages = np.zeros(len(survivors)) if reason else ADVANTAGES[config.advantage](rewards)
    return GroupOutcome(group, env, expected, survivors, reason, advantages.astype(np.float32))


def group_row(run: str, step: int, outcome: GroupOutcome, duration_s: float) -> Rows:
    """The outcome as a row of the `groups` data set."""
    rewards = [survivor.reward for survivor in outcome.survivors]
    tokens = [survivor.n_tokens for survivor in outcome.survivors]
    return batch_of(
        "groups",
        {
            "run": [run],
            "step": [step],
            "group": [outcome.group],
            "subgroup": [0],
            "env": [outcome.env],
            "expected": [outcome.expected],
            "survived": [len(outcome.survivors)],
            "reason": [outcome.reason],
            "reward_mean": [float(np.mean(rewards)) if rewards else math.nan],
            "reward_std": [float(np.std(rewards)) if rewards else math.nan],
            "tokens_mean": [float(np.mean(tokens)) if tokens else math.nan],
            "duration_s": [duration_s],
        },
    )


def batch_rows(run: str, step: int, outcomes: Sequence[GroupOutcome]) -> Rows:
    """The rows to train on, as a selection over the data set, in order of group and sample."""
    chosen = [
        (outcome, survivor, float(advantage))
        for outcome in sorted(outcomes, key=lambda outcome: outcome.group)
        if not outcome.reason
        for survivor, advantage in zip(outcome.survivors, outcome.advantages, strict=True)
    ]
    return batch_of(
        "batches",
        {
            "run": [run] * len(chosen),
            "step": [step] * len(chosen),
            "order": list(range(len(chosen))),
            "trajectory_id": [survivor.trajectory_id for _, survivor, _ in chosen],
            "group": [outcome.group for outcome, _, _ in chosen],
            "sample": [survivor.sample for _, survivor, _ in chosen],
            "env": [survivor.env for _, survivor, _ in chosen],
            "advantage": [advantage for _, _, advantage in chosen],
            "reward": [survivor.reward for _, survivor, _ in chosen],
            "source": [""] * len(chosen),
            "source_step": [step] * len(chosen),
        },
    )
