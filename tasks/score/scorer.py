"""What a scorer is, and how one is found by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tasks.config import made_by_name


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a scorer may read of a trajectory.

    Attributes:
        example: the problem, the reference answer included; JSON values.
        messages: the conversation, each {"role": ..., "content": ...}; the last one is the policy's.
        is_complete: True when the policy ended its answer itself, False when it was cut off.
    """

    trajectory_id: str
    example: Mapping[str, object]
    messages: Sequence[Mapping[str, str]]
    is_complete: bool

    @property
    def answer(self) -> str:
        """The policy's last message."""
        return self.messages[-1]["content"]


@dataclass(frozen=True, slots=True)
class Reward:
    """A trajectory's reward, and the parts it is the sum of."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)


class Scorer(Protocol):
    """Gives a reward to a trajectory by itself. It may run in another thread or process."""

    name: str
    version: str

    def score(self, candidate: Candidate) -> Reward:
        """Whatever it raises becomes a failed row of that trajectory."""


REGISTERED: Mapping[str, str] = {
    "addition": "tasks.score.addition:AdditionScorer",
    "calculator": "tasks.score.calculator:CalculatorScorer",
    "guess": "tasks.score.guess:GuessScorer",
}


def scorer_of(name: str) -> Scorer:
    """Make a scorer from its registered name or its import path `package.module:Class`.

    Raises:
        ConfigError: nothing can be imported under that name.
    """
    made: Scorer = made_by_name("score.scorer", name, REGISTERED)
    return made
