"""Compute a group's advantages, or the reason why it is not trained on, and write both as rows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from rollmill.tasks.errors import ScoreError
from rollmill.tasks.score.advantages import differ, resolve_advantage
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.credit import PositionRewards, compute_token_advantages
from rollmill.tasks.store.rows import Rows
from rollmill.tasks.store.schemas import dataset_schema, make_batch, ragged_array


def overlong_penalties(config: ScoreConfig, n_tokens: np.ndarray) -> np.ndarray:
    """Return [G] float64 penalties from -1 to 0 for completions of [G] sampled tokens (DAPO); 0 unless it is configured.

    Example: with score.overlong_tokens = [16, 20], lengths of 16, 17, 20 and 24 give 0, -.25, -1 and -1.
    """
    if not config.overlong_tokens:
        return np.zeros(len(n_tokens))
    start, end = config.overlong_tokens
    return np.clip((start - np.asarray(n_tokens, np.float64)) / (end - start), -1.0, 0.0)


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
        n_tokens: number of sampled tokens.
        reward: the scorer's reward, as stored.
        is_truncated: True if a length limit ended it.
        turn_starts: [turns] index of each turn's first token in the row.
        turn_tokens: [turns] sampled tokens of each turn.
        turn_rewards: [turns] as stored; empty: the scorer gave none.
        token_rewards: [n_tokens] as stored; empty: the scorer gave none.
    """

    trajectory_id: str
    sample: int
    env: str
    n_tokens: int
    reward: float
    subgroup: int = 0
    is_truncated: bool = False
    turn_starts: tuple[int, ...] = ()
    turn_tokens: tuple[int, ...] = ()
    turn_rewards: tuple[float, ...] = ()
    token_rewards: tuple[float, ...] = ()


SURVIVOR_COLUMNS = (
    *("trajectory_id", "sample", "env", "n_completion_tokens", "status"),
    *("turn_starts", "turn_tokens"),
)
"""Columns of `rollouts` that `survivors_from_rows` reads."""
SURVIVOR_SCORE_COLUMNS = ("trajectory_id", "status", "reward", "subgroup", "turn_rewards", "token_rewards")
"""Columns of `scores` that it reads."""


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """Result of a finished group, or of one subgroup if its scorer split the group.

    Attributes:
        subgroup: 0 unless a scorer split the group.
        expected: number of trajectories requested for the whole group.
        reason: why it is left out of the batch; empty if it is in the batch.
        advantages: [len(survivors)] float32; all 0 if it is left out. With `score.credit` turn or token the means of
            `token_advantages`.
        token_advantages: [len(survivors)][n_tokens] float32 of each sampled token in the row's order, with `score.credit` turn or
            token; else empty.
        trains_truncated: False: truncated survivors count in the baseline but are left out of the batch.
    """

    group: int
    env: str
    subgroup: int
    expected: int
    survivors: tuple[Survivor, ...]
    reason: str
    advantages: np.ndarray
    trains_truncated: bool = True
    token_advantages: tuple[np.ndarray, ...] = ()

    @property
    def in_batch(self) -> np.ndarray:
        """[len(survivors)] True for survivors in the batch; all False if the group is left out."""
        chosen = [
            not self.reason and (self.trains_truncated or not survivor.is_truncated)
            for survivor in self.survivors
        ]
        return np.array(chosen, np.bool_)

    @property
    def trained(self) -> list[tuple[Survivor, float, np.ndarray]]:
        """Survivors in the batch, each with its advantage and those of its tokens, which are empty with one for the trajectory."""
        by_token = self.token_advantages or [np.empty(0, np.float32)] * len(self.survivors)
        rows = zip(self.survivors, self.advantages, by_token, self.in_batch, strict=True)
        return [(survivor, float(one), of_tokens) for survivor, one, of_tokens, is_in in rows if is_in]


@dataclass(frozen=True, slots=True)
class RolloutOrigin:
    """Run and step under which the rollouts of a group are stored.

    Attributes:
        source: location of the run that sampled them; empty: the run that trains.
        step: the step they are stored under there.
    """

    source: str
    step: int


def survivors_from_rows(rollouts: Rows, scores: Rows) -> tuple[Survivor, ...]:
    """Return a group's trajectories that have a score, from its rows of `rollouts` and `scores`, ordered by sample."""
    scored = {
        row["trajectory_id"]: row
        for row in scores.select(SURVIVOR_SCORE_COLUMNS).to_pylist()
        if row["status"] == "scored"
    }
    rows = (row for row in rollouts.select(SURVIVOR_COLUMNS).to_pylist() if row["trajectory_id"] in scored)
    found = (
        Survivor(
            trajectory_id=row["trajectory_id"],
            sample=row["sample"],
            env=row["env"],
            n_tokens=row["n_completion_tokens"],
            reward=scored[row["trajectory_id"]]["reward"],
            subgroup=scored[row["trajectory_id"]]["subgroup"],
            is_truncated=row["status"] == "truncated",
            turn_starts=tuple(row["turn_starts"]),
            turn_tokens=tuple(row["turn_tokens"]),
            turn_rewards=tuple(scored[row["trajectory_id"]]["turn_rewards"]),
            token_rewards=tuple(scored[row["trajectory_id"]]["token_rewards"]),
        )
        for row in rows
    )
    return tuple(sorted(found, key=lambda survivor: survivor.sample))


def compute_advantages(
    config: ScoreConfig,
    *,
    group: int,
    env: str,
    expected: int,
    survivors: tuple[Survivor, ...],
    dropped: int = 0,
) -> tuple[GroupOutcome, ...]:
    """Compute the advantages of a group's survivors, or the reason to leave it out; one outcome for each subgroup.

    `expected` is the number of trajectories requested (G), `dropped` the number of those that the scorer dropped. Rewards include
    the overlong penalty, if one is configured.

    Example: four survivors with rewards 1, 0, 0, 1 and `advantage: mean` get .5, -.5, -.5, .5.

    Raises:
        ScoreError: the advantage function did not return one number for each survivor.
    """
    subgroups = sorted({survivor.subgroup for survivor in survivors}) or [0]
    is_short = config.needs_full_group and len(survivors) < expected
    outcomes = []
    for subgroup in subgroups:
        members = tuple(survivor for survivor in survivors if survivor.subgroup == subgroup)
        rewards = np.array([member.reward for member in members], np.float64)
        rewards += overlong_penalties(config, np.array([member.n_tokens for member in members]))
        reason = _drop_reason(config, rewards, is_short=is_short, is_dropped=not members and dropped > 0)
        if not reason and not config.train_truncated and all(member.is_truncated for member in members):
            reason = ALL_TRUNCATED
        advantages, by_token = np.zeros(len(members), np.float32), tuple[np.ndarray, ...]()
        if not reason:
            given, given_by_token = _compute_members(config, members, rewards)
            reason = _advantage_reason(config, members, given, given_by_token)
        if not reason:
            advantages, by_token = given, given_by_token
        outcome = GroupOutcome(
            group, env, subgroup, expected, members, reason, advantages, config.train_truncated, by_token
        )
        outcomes.append(outcome)
    return tuple(outcomes)


def _compute_members(
    config: ScoreConfig, members: Sequence[Survivor], rewards: np.ndarray
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Return the advantages [G] of a group's members with these [G] rewards, and those of their tokens; see GroupOutcome."""
    advantage = resolve_advantage(config.advantage)
    # A finite reward may overflow here: `mean` of 1e39 and 0 is 5e38, more than a float32 can hold.
    with np.errstate(over="ignore", invalid="ignore"):
        if config.credit == "trajectory":
            # Exactly 0 for rewards that differ by rounding alone, which a division by their deviation would enlarge.
            if advantage.needs_spread and not differ(rewards):
                return np.zeros(len(rewards), np.float32), ()
            return advantage.of_group(rewards).astype(np.float32), ()
        penalties = rewards - [member.reward for member in members]
        trajectories = [
            PositionRewards(
                reward=each.reward,
                penalty=penalty,
                n_tokens=each.n_tokens,
                turn_starts=each.turn_starts,
                turn_tokens=each.turn_tokens,
                turn_rewards=each.turn_rewards,
                token_rewards=each.token_rewards,
            )
            for each, penalty in zip(members, penalties.tolist(), strict=True)
        ]
        by_token = compute_token_advantages(advantage, trajectories, config.credit, config.discount)
        return _means(by_token), tuple(by_token)


def _means(by_token: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean of each of the arrays as float32, 0 of an empty one."""
    return np.array([each.mean(dtype=np.float64) if each.size else 0.0 for each in by_token], np.float32)


def _advantage_reason(
    config: ScoreConfig, members: Sequence[Survivor], advantages: np.ndarray, by_token: Sequence[np.ndarray]
) -> str:
    """Return the reason not to train on a group with these advantages; empty if there is none."""
    values = np.concatenate([advantages, *by_token])
    # One such number would make the whole batch's gradient NaN.
    if not np.isfinite(values).all():
        return NO_FINITE_ADVANTAGE
    trained = [
        each
        for each, member in zip(by_token, members, strict=False)
        if config.train_truncated or not member.is_truncated
    ]
    if config.credit == "trajectory" or any(each.any() for each in trained):
        return ""
    return NO_REWARD_SPREAD if _needs_spread(config) else ""


def _needs_spread(config: ScoreConfig) -> bool:
    return resolve_advantage(config.advantage).needs_spread and not config.train_without_spread


def _drop_reason(config: ScoreConfig, rewards: np.ndarray, *, is_short: bool, is_dropped: bool) -> str:
    """Return the reason not to train on survivors with these [G] rewards; empty if there is none."""
    if is_dropped:
        return DROPPED_BY_SCORER
    if is_short:
        return NOT_WHOLE
    # A complete group, or a subgroup of one, may have one trajectory, which no baseline can be computed for.
    fewest = config.min_group_size or (2 if resolve_advantage(config.advantage).needs_spread else 1)
    if len(rewards) < fewest:
        return TOO_FEW_SURVIVORS
    needs_spread = config.credit == "trajectory" and _needs_spread(config)
    return NO_REWARD_SPREAD if needs_spread and not differ(rewards) else ""


def group_rows(run: str, step: int, outcomes: Sequence[GroupOutcome], duration_s: float) -> Rows:
    """Return the outcomes of a group as rows of the `groups` data set."""
    rewards = [np.array([survivor.reward for survivor in outcome.survivors]) for outcome in outcomes]
    tokens = [np.array([survivor.n_tokens for survivor in outcome.survivors]) for outcome in outcomes]
    return make_batch(
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


_TOKEN_ADVANTAGES = dataset_schema("batches").field("token_advantages").type


def batch_rows(
    run: str,
    step: int,
    outcomes: Sequence[GroupOutcome],
    scorer: str,
    origins: Mapping[int, RolloutOrigin] = MappingProxyType({}),
) -> Rows:
    """Return the rows of the data set `batches` that a step trains on, ordered by group, subgroup and sample.

    `scorer` is NAME@VERSION of the scores that the rewards come from. `origins` says where the rollouts are stored, by group;
    groups without an entry belong to this run and step.
    """
    here = RolloutOrigin("", step)
    chosen = [
        (outcome, *trained, origins.get(outcome.group, here))
        for outcome in sorted(outcomes, key=lambda outcome: (outcome.group, outcome.subgroup))
        for trained in outcome.trained
    ]
    return make_batch(
        "batches",
        {
            "run": [run] * len(chosen),
            "step": [step] * len(chosen),
            "order": list(range(len(chosen))),
            "trajectory_id": [survivor.trajectory_id for _, survivor, *_ in chosen],
            "group": [outcome.group for outcome, *_ in chosen],
            "sample": [survivor.sample for _, survivor, *_ in chosen],
            "env": [survivor.env for _, survivor, *_ in chosen],
            "advantage": [advantage for _, _, advantage, *_ in chosen],
            "token_advantages": ragged_array([each[3] for each in chosen], _TOKEN_ADVANTAGES),
            "reward": [survivor.reward for _, survivor, *_ in chosen],
            "source": [origin.source for *_, origin in chosen],
            "source_step": [origin.step for *_, origin in chosen],
            "scorer": [scorer] * len(chosen),
        },
    )


def compute_batch_advantages(config: ScoreConfig, outcomes: Sequence[GroupOutcome]) -> list[GroupOutcome]:
    """Return a step's outcomes, by group and subgroup, with the advantages after `Advantage.of_batch`, if there is one.

    Raises:
        ScoreError: the batch part did not return one finite float32 for each trajectory.
    """
    # In the order of the batch: sums of floats depend on it, and a step that is computed again must get bitwise equal advantages.
    ordered = sorted(outcomes, key=lambda outcome: (outcome.group, outcome.subgroup))
    of_batch = resolve_advantage(config.advantage).of_batch
    if of_batch is None or not any(outcome.in_batch.any() for outcome in ordered):
        return ordered
    trained = [each for outcome in ordered for each in outcome.trained]
    if config.credit == "trajectory":
        advantages = np.array([advantage for _, advantage, _ in trained])
        n_tokens = np.array([survivor.n_tokens for survivor, *_ in trained], np.int64)
    else:
        advantages = np.concatenate([of_tokens for *_, of_tokens in trained])
        n_tokens = np.ones(len(advantages), np.int64)
    with np.errstate(over="ignore", invalid="ignore"):
        given = np.asarray(of_batch(advantages.astype(np.float64), n_tokens)).astype(np.float32)
    if not np.isfinite(given).all():
        raise ScoreError(
            f"score.advantage {config.advantage}: over the batch it gave a number that is not finite"
        )
    if config.credit == "trajectory":
        parts = np.split(given, np.cumsum([outcome.in_batch.sum() for outcome in ordered])[:-1])
        return [_replace_trained(outcome, part) for outcome, part in zip(ordered, parts, strict=True)]
    by_token = iter(np.split(given, np.cumsum([survivor.n_tokens for survivor, *_ in trained])[:-1]))
    final = []
    for outcome in ordered:
        of_outcome = [
            next(by_token) if is_in else old
            for old, is_in in zip(outcome.token_advantages, outcome.in_batch, strict=False)
        ]
        means = _means(of_outcome)[outcome.in_batch] if of_outcome else np.empty(0, np.float32)
        final.append(replace(_replace_trained(outcome, means), token_advantages=tuple(of_outcome)))
    return final


def _replace_trained(outcome: GroupOutcome, advantages: np.ndarray) -> GroupOutcome:
    """Return the outcome with other advantages of its survivors in the batch; those outside, such as truncated ones, keep theirs."""
    own = outcome.advantages.copy()
    own[outcome.in_batch] = advantages
    return replace(outcome, advantages=own)
