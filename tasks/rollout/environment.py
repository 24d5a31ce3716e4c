"""What an environment is, and how one is found by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from tasks.config import made_by_name

Split = Literal["train", "held_out"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


@dataclass(frozen=True, slots=True)
class Example:
    """One problem.

    Attributes:
        example_id: the environment's own name for it.
        content: all that a scorer may read, the reference answer included; JSON values only.
    """

    example_id: str
    content: Mapping[str, object]


class Episode(Protocol):
    """One attempt at a problem as its environment plays it; it may keep state between the turns.

    Example: an addition episode's `reply(())` is (Message("user", "47+38="),), and its `reply` after the
    policy's completion is () since the episode is over.
    """

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        """What the environment says next.

        Args:
            messages: the conversation so far, the policy's message last; empty at the opening.

        Returns:
            The opening, the environment's turn, or nothing when the episode is over.
        """

    async def close(self) -> Mapping[str, object]:
        """End the episode, which is called once however it went; returns what a scorer may read of it (JSON values)."""


@dataclass(frozen=True, slots=True)
class SingleTurn:
    """The episode of a problem that is over with the policy's first message."""

    opening: tuple[Message, ...]

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        return () if messages else self.opening

    async def close(self) -> Mapping[str, object]:
        return {}


class Environment(Protocol):
    """Produces problems, and plays the episodes of their trajectories."""

    name: str

    def size(self, split: Split) -> int:
        """Number of problems in a split."""

    async def example(self, split: Split, index: int) -> Example:
        """The problem with this number, 0 <= index < size(split); the same one at every call."""

    def episode(self, example: Example, seed: int) -> Episode:
        """A new attempt at a problem; whatever is random in it follows from `seed`."""


@runtime_checkable
class WarmUp(Protocol):
    """An environment that can also write the corpus of a start model."""

    def warm_up_corpus(self, seed: int, n_examples: int) -> list[tuple[str, str]]:
        """(prompt, answer) pairs over the training problems only; the same ones for the same arguments."""


REGISTERED: Mapping[str, str] = {"addition": "tasks.rollout.addition:Addition"}


def environment_of(name: str) -> Environment:
    """Make an environment from its registered name or its import path `package.module:Class`.

    Raises:
        ConfigError: nothing can be imported under that name.
    """
    made: Environment = made_by_name("rollout.environment", name, REGISTERED)
    return made
