"""What a scorer is given and what it gives back: all that a module with a scorer has to import."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a scorer may read of a trajectory.

    Attributes:
        example: the problem, the reference answer included; JSON values.
        messages: the conversation, each {"role": ..., "content": ...}.
        is_complete: True when the policy ended its answer itself, False when it was cut off.
        outcome: what the environment said of how the episode ended; JSON values, {} for nothing.
        env: name of the environment.
        n_completion_tokens: tokens that the policy sampled.
    """

    trajectory_id: str
    example: Mapping[str, object]
    messages: Sequence[Mapping[str, str]]
    is_complete: bool
    outcome: Mapping[str, object] = field(default_factory=dict)
    env: str = ""
    n_completion_tokens: int = 0

    @property
    def answer(self) -> str:
        """The policy's last message; empty when it said nothing."""
        said = (each["content"] for each in reversed(self.messages) if each["role"] == "assistant")
        return next(said, "")


@dataclass(frozen=True, slots=True)
class Reward:
    """A trajectory's reward.

    Attributes:
        components: the parts it is made of, by name.
        subgroup: which part of its group it is compared with; 0 unless the scorer splits the group.
    """

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    subgroup: int = 0


@dataclass(frozen=True, slots=True)
class Dropped:
    """A trajectory that is not trained on, and why; no failure."""

    reason: str


@dataclass(frozen=True, slots=True)
class DropGroup:
    """A group's scorer says so of all trajectories that it was given."""

    reason: str


Given: TypeAlias = float | Reward | Dropped
"""What a scorer gives for one trajectory."""

GivenGroup: TypeAlias = Sequence[Given] | DropGroup
"""What a group's scorer gives: one for each candidate, in order, or one for all."""


class Scorer(Protocol):
    """Gives a reward to a trajectory by itself.

    `score` may be `async def`: it then runs on the event loop and may wait, but not compute. Otherwise it
    runs in a worker process. Whatever it raises becomes a failed row of that trajectory.

    A class may have `by_group = True`; its `score` then takes the candidates of a group that survived and gives
    one verdict each, or DropGroup. It may have `close`, `async` too, which is called at the end.
    """

    name: str
    version: str

    def score(self, candidate: Candidate) -> Given | Awaitable[Given]:
        """The trajectory's reward, or why it is dropped."""


Function = TypeVar("Function", bound=Callable[..., object])


def by_group(function: Function) -> Function:
    """Mark a function as a group's scorer: it takes the candidates of a group and gives one verdict each."""
    function.by_group = True  # type: ignore[attr-defined] # functions take attributes
    return function
