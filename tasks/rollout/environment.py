"""What an environment is, and how one is found by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from tasks.config import made_by_name, named
from tasks.rollout.config import RolloutConfig

Split = Literal["train", "held_out"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
        name: of the tool that speaks.
        tool_call_id: which call a tool answers.
        tool_calls: calls in an assistant's message that was not sampled here; the policy's own stay in its content.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: str = ""
    tool_call_id: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()

    def as_json(self) -> dict[str, object]:
        """What is set of it, as chat templates and data sets have it."""
        every = {field: getattr(self, field) for field in self.__slots__}
        return {field: value for field, value in every.items() if value or field in ("role", "content")}


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
    """Produces problems, and plays the episodes of their trajectories.

    Attributes:
        tools: JSON schemas of what the policy may call, for the model's chat template.
        stop: texts of one token each that end the policy's turn, as its end of sequence does; they stay in it.
    """

    name: str
    tools: Sequence[Mapping[str, object]]
    stop: Sequence[str]

    def size(self, split: Split) -> int:
        """Number of problems in a split."""

    async def example(self, split: Split, index: int) -> Example:
        """The problem with this number, 0 <= index < size(split); the same one at every call."""

    def episode(self, example: Example, seed: int) -> Episode:
        """A new attempt at a problem; whatever is random in it follows from `seed`."""


@runtime_checkable
class WarmUp(Protocol):
    """An environment that can also write the corpus of a start model."""

    def warm_up_corpus(self, seed: int, n_examples: int) -> Sequence[Sequence[Message]]:
        """Conversations over the training problems only, the policy's messages as it is to say them.

        The same ones for the same arguments.
        """


@runtime_checkable
class Configurable(Protocol):
    """An environment's class that is made from the settings of `rollout`, not without arguments."""

    def from_config(self, config: RolloutConfig) -> Environment:
        """Make it; ConfigError names the setting that is wrong."""


REGISTERED: Mapping[str, str] = {
    "addition": "tasks.rollout.addition:Addition",
    "calculator": "tasks.rollout.calculator:Calculator",
    "guess": "tasks.rollout.guess:Guess",
    "prompts": "tasks.rollout.prompt_environment:Prompts",
}

LIBRARIES: Mapping[str, str] = {"verifiers": "tasks.rollout.verifiers_environment:Verifiers"}
"""Libraries whose environments are named LIBRARY:NAME; they are played in worker processes alone."""


def library_of(config: RolloutConfig) -> str:
    """The library that the environment comes from, "" for none.

    Example: "verifiers" for `verifiers:textarena`.
    """
    library = config.environment.partition(":")[0]
    return library if library in LIBRARIES else ""


def environment_of(config: RolloutConfig) -> Environment:
    """Make an environment in this process, from its registered name or its import path `package.module:Class`.

    Raises:
        ConfigError: nothing can be imported under that name, or it cannot be made from these settings.
    """
    field, name = "rollout.environment", config.environment
    factory = named(field, LIBRARIES.get(library_of(config), name), REGISTERED)
    if isinstance(factory, Configurable):
        return factory.from_config(config)
    made: Environment = made_by_name(field, name, REGISTERED)
    return made
