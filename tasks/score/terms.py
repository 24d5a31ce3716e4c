"""Resolve scorers by name into the weighted terms of a reward, and check them before a run starts."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from rollmill.tasks.config import find_plugins, suggest
from rollmill.tasks.errors import ConfigError, ScoreError, VerdictError, user_error_text
from rollmill.tasks.score.advantages import Advantage, resolve_advantage
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.credit import PositionRewards
from rollmill.tasks.score.score_function import ScoreFunction, load_function, settings_version
from rollmill.tasks.score.verdict import ScoreVerdict, verdict_from_error
from rollmill.tasks.user_code.plug_in import PlugIn

SCORERS: Mapping[str, str] = {
    "addition": "rollmill.tasks.score.scorers.built_in:AdditionScorer",
    "calculator": "rollmill.tasks.score.scorers.built_in:CalculatorScorer",
    "calculator_turns": "rollmill.tasks.score.scorers.built_in:CalculatorTurnsScorer",
    "code": "rollmill.tasks.score.scorers.code_scorer:CodeScorer",
    "environment": "rollmill.tasks.score.scorers.built_in:EnvironmentScorer",
    "exact": "rollmill.tasks.score.scorers.built_in:ExactScorer",
    "guess": "rollmill.tasks.score.scorers.built_in:GuessScorer",
    "judge": "rollmill.tasks.score.scorers.judge:Judge",
    "math": "rollmill.tasks.score.scorers.built_in:MathScorer",
    "reward_model": "rollmill.tasks.score.scorers.reward_model:RewardModel",
    "ruler": "rollmill.tasks.score.scorers.judge:Ruler",
}

# NAME@VERSION is part of a folder's name.
_KEY_PATTERN = re.compile(r"[\w.+-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class ScorerTerm:
    """One scorer of a weighted sum of rewards, with its weight.

    Attributes:
        function: the scorer.
        path, args: import path and arguments for worker processes.
        label: name of its reward component: the scorer's, or NAME@VERSION if another term has the same scorer with other arguments.
    """

    function: ScoreFunction
    path: str
    args: Mapping[str, Any]
    weight: float
    label: str


@dataclass(frozen=True, slots=True)
class RewardTerms:
    """The configured scorer, loaded: a single scorer, or several whose weighted rewards are added.

    Attributes:
        is_sum: True: rewards are weighted and added. False: `parts` has one element, used unchanged.
        description: what the version is a digest of: the arguments, or weights and scorers; empty if the version is the scorer's.
    """

    parts: tuple[ScorerTerm, ...]
    is_sum: bool
    name: str
    version: str
    description: str = ""

    @property
    def key(self) -> str:
        """NAME@VERSION under which the scores are stored."""
        return f"{self.name}@{self.version}"

    @property
    def by_group(self) -> bool:
        """True if one of the scorers needs a group's survivors together."""
        return any(part.function.by_group for part in self.parts)

    @property
    def keeps_state(self) -> bool | None:
        """True if one of the scorers declares that it keeps state, False if all declare that they do not, None otherwise."""
        declared = {part.function.keeps_state for part in self.parts}
        return True if True in declared else False if declared == {False} else None


def resolve_terms(config: ScoreConfig, scorer: PlugIn | None = None) -> RewardTerms:
    """Load the configured scorer, or all scorers of the configured sum, without starting a process.

    If `scorer` is given, it is loaded in place of the configured one, for evaluations.

    Raises:
        ConfigError: there is no such scorer, or it lacks a setting.
    """
    if scorer or not config.sum:
        field, chosen = ("evaluate.scorer", scorer) if scorer else ("score.scorer", config.scorer)
        part = _resolve_term(field, chosen, 1.0, config)
        given = str(chosen) if chosen.args else ""
        return RewardTerms((part,), False, part.function.name, part.function.version, given)
    parts = tuple(
        _resolve_term(f"score.sum.{number}.scorer", each.scorer, each.weight, config)
        for number, each in enumerate(config.sum)
    )
    keys, names = (Counter(getattr(part.function, each) for part in parts) for each in ("key", "name"))
    if twice := [part.function.name for part in parts if keys[part.function.key] > 1]:
        raise ConfigError("score.sum", twice[0], "give each scorer once: its name is its component's")
    parts = tuple(
        replace(part, label=part.function.key) if names[part.function.name] > 1 else part for part in parts
    )
    version = settings_version([(part.function.key, part.weight) for part in parts])
    return RewardTerms(
        parts, True, "sum", version, " + ".join(f"{each.weight:g} * {each.scorer}" for each in config.sum)
    )


def _resolve_term(field: str, scorer: PlugIn, weight: float, config: ScoreConfig) -> ScorerTerm:
    registered = {**find_plugins("scorers"), **SCORERS}
    name = scorer.name
    path = registered.get(name, name)
    try:
        function = load_function(path, lambda: config, scorer.args, field)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        # The module and the class are foreign code: whatever they raise.
        names = ", ".join(sorted(registered))
        remedy = (
            f"{type(error).__name__}: {user_error_text(error)}; give a registered name ({names}) or an import path "
            f"package.module:attribute of a function, or of a class with `score`{suggest(name, registered)}"
        )
        raise ConfigError(field, name, remedy) from error
    for what, value in (("name", function.name), ("version", function.version)):
        if not _KEY_PATTERN.fullmatch(value):
            remedy = f"its {what} is {value!r}; give one of letters, digits, and . _ + - (it names a folder)"
            raise ConfigError(field, name, remedy)
    return ScorerTerm(function, path, scorer.args, weight, function.name)


def check_scorer(config: ScoreConfig, held_out_scorer: PlugIn | None = None) -> None:
    """Check that the configured scorers and advantage function can be used, without starting a process.

    `held_out_scorer` is that of evaluations; empty or None: that of the steps.

    Raises:
        ConfigError: a scorer cannot be imported, lacks a setting, or needs groups, which held-out trajectories do not have; or the
            advantage function does not return one number for each reward.
    """
    resolve_terms(config)
    # Tried on the smallest group, so that a wrong function ends the run before anything is started.
    advantage = resolve_advantage(config.advantage)
    rewards = np.arange(max(2, config.min_group_size), dtype=np.float64)
    try:
        found = advantage.of_group(rewards)
        if advantage.of_batch is not None:
            advantage.of_batch(found, np.ones(len(rewards), np.int64))
        if config.credit != "trajectory":
            # What is not finite is reported as an error.
            with np.errstate(divide="ignore", invalid="ignore"):
                _try_positions(advantage, rewards)
    except ScoreError as error:
        remedy = f"tried on the rewards {rewards.tolist()}: {error}"
        raise ConfigError("score.advantage", config.advantage.name, remedy) from error
    if resolve_terms(config, held_out_scorer).by_group:
        remedy = "held-out trajectories are scored one by one; name a scorer that does not compare those of a group"
        raise ConfigError("evaluate.scorer", str(held_out_scorer or ""), remedy)


def _try_positions(advantage: Advantage, rewards: np.ndarray) -> None:
    """Try an advantage function on some positions; raises ScoreError if it cannot be used for credit by turn or token."""
    if advantage.by_position is not None:
        present = np.tri(len(rewards), dtype=bool)
        advantage.by_position(present * rewards, present)
        return
    columns = np.stack([rewards, 2.0 * rewards + 3.0], axis=1)
    by_column = np.stack([advantage.of_group(each) for each in columns.T], axis=1)
    if advantage.takes_columns and not np.allclose(advantage.of_group(columns), by_column, equal_nan=True):
        raise ScoreError(
            "with takes_columns it must give each column of [G, K] what it gives that column alone"
        )
    # A position that one trajectory alone has.
    if not advantage.needs_spread and not np.isfinite(advantage.of_group(np.ones(1))).all():
        raise ScoreError(
            "without needs_spread it must take one reward alone, [1], and return a finite number"
        )


def sum_verdicts(
    parts: Sequence[ScorerTerm],
    verdicts: Sequence[ScoreVerdict],
    turn_tokens: Sequence[int],
    n_tokens: int,
) -> ScoreVerdict:
    """Add the verdicts of all terms for one trajectory; the components are the weighted rewards.

    If a term has rewards of turns or tokens, so has the sum: a coarser reward counts at the last turn or token that it is for.
    `turn_tokens` are the sampled tokens of each turn, `n_tokens` those of the trajectory. A failed term makes the sum fail, a dropped one drops the trajectory; at most one term may split the group.

    Example: weights 1 and 0.5 and rewards .8 and 1 give 1.3 with components .8 and .5.
    """
    # The terms run concurrently: the longest one is the time of all.
    duration_s = max(verdict.duration_s for verdict in verdicts)
    for status in ("failed", "dropped"):
        for part, verdict in zip(parts, verdicts, strict=True):
            if verdict.status == status:
                return replace(verdict, error=f"{part.label}: {verdict.error}", duration_s=duration_s)
    subgroups = {verdict.subgroup for verdict in verdicts} - {0}
    if len(subgroups) > 1:
        error = VerdictError("two scorers of the sum split the group; at most one may")
        return verdict_from_error(error, duration_s)
    components = {
        part.label: part.weight * verdict.reward for part, verdict in zip(parts, verdicts, strict=True)
    }
    return ScoreVerdict(
        "scored",
        reward=sum(components.values()),
        components=components,
        subgroup=max(subgroups, default=0),
        turn_rewards=_sum_positions(parts, verdicts, turn_tokens, n_tokens, "turn"),
        token_rewards=_sum_positions(parts, verdicts, turn_tokens, n_tokens, "token"),
        duration_s=duration_s,
    )


def _sum_positions(
    parts: Sequence[ScorerTerm],
    verdicts: Sequence[ScoreVerdict],
    turn_tokens: Sequence[int],
    n_tokens: int,
    level: Literal["turn", "token"],
) -> tuple[float, ...]:
    """Return the weighted sums at each turn or token; empty unless that is the finest level at which a term has rewards."""
    has_tokens = any(each.token_rewards for each in verdicts)
    if has_tokens != (level == "token") or not (has_tokens or any(each.turn_rewards for each in verdicts)):
        return ()
    rewards = [
        part.weight
        * PositionRewards(each.reward, n_tokens, (), turn_tokens, each.turn_rewards, each.token_rewards).at(
            level
        )
        for part, each in zip(parts, verdicts, strict=True)
    ]
    return tuple(np.sum(rewards, axis=0).tolist())
