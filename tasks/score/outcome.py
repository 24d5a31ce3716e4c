"""What becomes of a group: its advantages, or the reason why it is not trained on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from tasks.score.advantages.registry import advantage_of
from tasks.score.config import ScoreConfig
from tasks.score.overlong import penalties
from tasks.store.rows import Rows
from tasks.store.schemas import batch_of

TOO_FEW_SURVIVORS = "too_few_survivors"
NOT_WHOLE = "not_whole"
DROPPED_BY_SCORER = "dropped_by_scorer"
NO_REWARD_SPREAD = "no_reward_spread"
NO_FINITE_ADVANTAGE = "no_finite_advantage"
ALL_TRUNCATED = "all_truncated"


@dataclass(frozen=True, slots=True)
class Survivor:
    """A trajectory of a group that has tokens and a reward.

    Attributes:
        n_tokens: sampled ones.
        reward: the scorer's, as it is stored.
        is_truncated: True when a length limit ended it.
    """

    trajectory_id: str
    sample: int
    env: str
    n_tokens: int
    reward: float
    subgroup: int = 0
    is_truncated: bool = False


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """A group when its last part came back, or a part of one that its scorer split.

    Attributes:
        subgroup: 0 unless a scorer split the group.
        expected: trajectories asked for, of the whole group.
        reason: why it is out of the batch; empty when it is in.
        advantages: [len(survivors)] float32; all 0 when it is out.
        trains_truncated: False: survivors that were truncated are in the baseline, and not in the batch.
    """

    group: int
    env: str
    subgroup: int
    expected: int
    survivors: tuple[Survivor, ...]
    reason: str
    advantages: np.ndarray
    trains_truncated: bool = True

    @property
    def in_batch(self) -> np.ndarray:
        """[len(survivors)] True for those that are in the batch; none when the group is out."""
        chosen = [
            not self.reason and (self.trains_truncated or not survivor.is_truncated)
            for survivor in self.survivors
        ]
        return np.array(chosen, np.bool_)

    @property
    def trained(self) -> list[tuple[Survivor, float]]:
        """The survivors that are in the batch, each with its advantage."""
        rows = zip(self.survivors, self.advantages, self.in_batch, strict=True)
        return [(survivor, float(advantage)) for survivor, advantage, is_in in rows if is_in]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a group's rollouts lie.

    Attributes:
        source: location of the run that sampled them; empty: the run that trains.
        step: the step under which they are stored there.
    """

    source: str
    step: int


def survivors_of(rollouts: Rows, scores: Rows) -> tuple[Survivor, ...]:
    """The scored trajectories among a group's rows, by sample."""
    scored = {
        row["trajectory_id"]: row
        for row in scores.select(["trajectory_id", "status", "reward", "subgroup"]).to_pylist()
        if row["status"] == "scored"
    }
    columns = ["trajectory_id", "sample", "env", "n_completion_tokens", "status"]
    rows = (row for row in rollouts.select(columns).to_pylist() if row["trajectory_id"] in scored)
    found = (
        Survivor(
            trajectory_id=row["trajectory_id"],
            sample=row["sample"],
            env=row["env"],
            n_tokens=row["n_completion_tokens"],
            reward=scored[row["trajectory_id"]]["reward"],
            subgroup=scored[row["trajectory_id"]]["subgroup"],
            is_truncated=row["status"] == "truncated",
        )
        for row in rows
    )
    return tuple(sorted(found, key=lambda survivor: survivor.sample))


def judge_group(
    config: ScoreConfig,
    *,
    group: int,
    env: str,
    expected: int,
    survivors: tuple[Survivor, ...],
    dropped: int = 0,
) -> tuple[GroupOutcome, ...]:
    """Advantages over the survivors, or the reason to leave the group out; one outcome for each subgroup.

    Args:
        config: settings of scoring.
        group: its number.
        env: its environment.
        expected: trajectories asked for (G).
        survivors: those with a reward.
        dropped: trajectories that the scorer dropped.

    Rewards are taken with their overlong punishment (tasks.score.overlong), if any.

    Example: four survivors with rewards 1, 0, 0, 1 and `advantage: mean` get .5, -.5, -.5, .5.

    Raises:
        ScoreError: the advantage function did not give one number for each survivor.
    """
    subgroups = sorted({survivor.subgroup for survivor in survivors}) or [0]
    is_short = config.needs_whole_group and len(survivors) < expected
    outcomes = []
    for subgroup in subgroups:
        members = tuple(survivor for survivor in survivors if survivor.subgroup == subgroup)
        rewards = shaped_rewards(config, members)
        reason = _reason(config, rewards, is_short=is_short, is_dropped=not members and dropped > 0)
        if not reason and not config.train_truncated and all(member.is_truncated for member in members):
            reason = ALL_TRUNCATED
        advantages = np.zeros(len(members), np.float32)
        if not reason:
            advantages, reason = _advantages(config, rewards)
        outcome = GroupOutcome(
            group, env, subgroup, expected, members, reason, advantages, config.train_truncated
        )
        outcomes.append(outcome)
    return tuple(outcomes)


def shaped_rewards(config: ScoreConfig, survivors: Sequence[Survivor]) -> np.ndarray:
    """[G] float64 rewards that advantages are taken of: the scorer's, and what their lengths add."""
    rewards = np.array([survivor.reward for survivor in survivors], np.float64)
    rewards += penalties(config, np.array([survivor.n_tokens for survivor in survivors]))
    return rewards


def _advantages(config: ScoreConfig, rewards: np.ndarray) -> tuple[np.ndarray, str]:
    """([G] float32 advantages, ""); (zeros, the reason) when one of them is no finite float32.

    Example: `mean` of the rewards 1e39 and 0 is 5e38 and -5e38, more than a float32 can hold.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        advantages = advantage_of(config.advantage).of_group(rewards).astype(np.float32)
    if np.isfinite(advantages).all():
        return advantages, ""
    return np.zeros_like(advantages), NO_FINITE_ADVANTAGE


def _reason(config: ScoreConfig, rewards: np.ndarray, *, is_short: bool, is_dropped: bool) -> str:
    """Why survivors with these rewards are not trained on; empty when they are."""
    if is_dropped:
        return DROPPED_BY_SCORER
    if is_short:
        return NOT_WHOLE
    if len(rewards) < config.min_group_size:
        return TOO_FEW_SURVIVORS
    needs_spread = advantage_of(config.advantage).needs_spread
    return NO_REWARD_SPREAD if needs_spread and np.ptp(rewards) == 0.0 else ""


def group_rows(run: str, step: int, outcomes: Sequence[GroupOutcome], duration_s: float) -> Rows:
    """The outcomes of a group as rows of the `groups` data set."""
    rewards = [np.array([survivor.reward for survivor in outcome.survivors]) for outcome in outcomes]
    tokens = [np.array([survivor.n_tokens for survivor in outcome.survivors]) for outcome in outcomes]
    return batch_of(
        "groups",
        {
            "run": [run] * len(outcomes),
            "step": [step] * len(outcomes),
            "group": [outcome.group for outcome in outcomes],
            "subgroup": [outcome.subgroup for outcome in outcomes],
            "env": [outcome.env for outcome in outcomes],
            "expected": [outcome.expected for outcome in outcomes],
            "survived": [len(outcome.survivors) for outcome in outcomes],
            "reason": [outcome.reason for outcome in outcomes],
            "reward_mean": [float(each.mean()) if each.size else math.nan for each in rewards],
            "reward_std": [float(each.std()) if each.size else math.nan for each in rewards],
            "tokens_mean": [float(each.mean()) if each.size else math.nan for each in tokens],
            "duration_s": [duration_s] * len(outcomes),
        },
    )


def batch_rows(
    run: str,
    step: int,
    outcomes: Sequence[GroupOutcome],
    scorer: str,
    origins: Mapping[int, Origin] = MappingProxyType({}),
) -> Rows:
    """The rows to train on, as a selection over the data set, in order of group and sample.

    Args:
        run: the run that trains.
        step: its step.
        outcomes: the groups.
        scorer: NAME@VERSION of the scores that the rewards come from.
        origins: where the rollouts lie, by group; those of a group without one are this run's, of this step.
    """
    here = Origin("", step)
    chosen = [
        (outcome, survivor, advantage, origins.get(outcome.group, here))
        for outcome in sorted(outcomes, key=lambda outcome: (outcome.group, outcome.subgroup))
        for survivor, advantage in outcome.trained
    ]
    return batch_of(
        "batches",
        {
            "run": [run] * len(chosen),
            "step": [step] * len(chosen),
            "order": list(range(len(chosen))),
            "trajectory_id": [survivor.trajectory_id for _, survivor, _, _ in chosen],
            "group": [outcome.group for outcome, _, _, _ in chosen],
            "sample": [survivor.sample for _, survivor, _, _ in chosen],
            "env": [survivor.env for _, survivor, _, _ in chosen],
            "advantage": [advantage for _, _, advantage, _ in chosen],
            "reward": [survivor.reward for _, survivor, _, _ in chosen],
            "source": [origin.source for _, _, _, origin in chosen],
            "source_step": [origin.step for _, _, _, origin in chosen],
            "scorer": [scorer] * len(chosen),
        },
    )
