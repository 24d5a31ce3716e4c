"""What a scorer is, and how one is found by name."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tasks.errors import ConfigError


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


REGISTERED: Mapping[str, str] = {"addition": "tasks.score.addition:AdditionScorer"}


def scorer_of(name: str) -> Scorer:
    """Make a scorer from its registered name or its import path `package.module:Class`.

    Raises:
        ConfigError: nothing can be imported under that name.
    """
    path = REGISTERED.get(name, name)
    module, _, attribute = path.partition(":")
    try:
        made: Scorer = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        names = ", ".join(sorted(REGISTERED))
        remedy = f"give a registered name ({names}) or an import path package.module:Class ({error})"
        raise ConfigError("score.scorer", name, remedy) from error
    return made
