"""Scorers by name, and the parts that a configuration's scorer consists of."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tasks.config import nearest
from tasks.errors import ConfigError
from tasks.score.config import ScoreConfig
from tasks.score.function import ScoreFunction, digest_of, function_at

REGISTERED: Mapping[str, str] = {
    "addition": "tasks.score.addition:AdditionScorer",
    "calculator": "tasks.score.calculator:CalculatorScorer",
    "environment": "tasks.score.outcome_reward:EnvironmentScorer",
    "exact": "tasks.score.exact:ExactScorer",
    "guess": "tasks.score.guess:GuessScorer",
    "judge": "tasks.score.judge:Judge",
    "math": "tasks.score.math_answer:MathScorer",
    "reward_model": "tasks.score.reward_model:RewardModel",
    "ruler": "tasks.score.ruler:Ruler",
}

_KEY_PART = re.compile(r"[\w.+-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Part:
    """One scorer of a weighted sum.

    Attributes:
        path: where a worker process imports it from.
        label: its component's name.
    """

    function: ScoreFunction
    path: str
    label: str
    weight: float


@dataclass(frozen=True, slots=True)
class Parts:
    """A configuration's scorer.

    Attributes:
        is_sum: True when rewards are weighted and added; False: `parts` is one, as it is.
    """

    parts: tuple[Part, ...]
    is_sum: bool
    name: str
    version: str

    @property
    def by_group(self) -> bool:
        """True when a part wants a group's survivors together."""
        return any(part.function.by_group for part in self.parts)


def parts_of(config: ScoreConfig, scorer: str = "") -> Parts:
    """The scorer of a configuration; nothing is started.

    Args:
        config: the settings.
        scorer: another one than theirs, that of evaluations.

    Raises:
        ConfigError: there is no such scorer, or it lacks a setting that it needs.
    """
    if scorer or not config.sum:
        part = _part("evaluate.scorer" if scorer else "score.scorer", scorer or config.scorer, 1.0, config)
        return Parts((part,), False, part.function.name, part.function.version)
    parts = tuple(
        _part(f"score.sum.{number}.scorer", each.scorer, each.weight, config)
        for number, each in enumerate(config.sum)
    )
    labels = Counter(part.label for part in parts)
    if twice := [label for label, count in labels.items() if count > 1]:
        raise ConfigError("score.sum", twice[0], "give each scorer once: its name is its component's")
    return Parts(parts, True, "sum", digest_of([(part.function.key, part.weight) for part in parts]))


def _part(field: str, name: str, weight: float, config: ScoreConfig) -> Part:
    path = REGISTERED.get(name, name)
    try:
        function = function_at(path, lambda: config)
    except ConfigError:
        raise
    except Exception as error:  # the module and the class are foreign code: whatever they raise
        names = ", ".join(sorted(REGISTERED))
        remedy = (
            f"give a registered name ({names}) or an import path package.module:attribute of a function, or of a "
            f"class that is made without arguments or has `from_config` ({type(error).__name__}: {error})"
            f"{nearest(name, REGISTERED)}"
        )
        raise ConfigError(field, name, remedy) from error
    for what, value in (("name", function.name), ("version", function.version)):
        if not _KEY_PART.fullmatch(value):
            remedy = f"its {what} is {value!r}; give one of letters, digits, and . _ + - (it names a folder)"
            raise ConfigError(field, name, remedy)
    return Part(function, path, function.name, weight)
