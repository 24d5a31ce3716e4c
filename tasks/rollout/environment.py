"""The interface of an environment, and how to find one by name."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from rollmill.tasks.config import find_plugins, guard_named, import_named
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.user_code.arguments import bind_arguments, make_argument_schema, name_arguments

Split = Literal["train", "held_out"]
HELD_OUT_MODULUS = 5
Problem = TypeVar("Problem")


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation between environment and policy.

    Attributes:
        name: name of the tool that the message is from.
        tool_call_id: id of the call that a tool's message answers.
        tool_calls: calls in an assistant message that was not sampled here; the policy's own calls stay in its content.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: str = ""
    tool_call_id: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()

    def as_json(self) -> dict[str, object]:
        """Return the non-empty fields, as chat templates and data sets expect them."""
        every = {field: getattr(self, field) for field in self.__slots__}
        return {field: value for field, value in every.items() if value or field in ("role", "content")}


@dataclass(frozen=True, slots=True)
class Example:
    """One problem of an environment.

    Attributes:
        example_id: id that the environment gives the problem.
        content: everything a scorer may read, including the reference answer; JSON values only.
    """

    example_id: str
    content: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A reply that is the whole conversation: what the policy sees from here on.

    An environment returns it to drop or rewrite context, to begin the conversation of a sub-agent, or to return to an earlier one. What it
    has in common with what the policy saw before is not computed or stored again; the rest begins a segment of the trajectory.

    Attributes:
        messages: the whole conversation, at least one message.
        tools: JSON schemas of the tools from here on; None: those of the environment.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, object]] | None = None


class TokenCounts(NamedTuple):
    """Tokens of one completion of the policy, and of the sequence that it continues.

    Attributes:
        prompt: tokens before the completion, those of earlier turns included.
        completion: sampled tokens, an end of sequence included.
    """

    prompt: int
    completion: int


class Episode(Protocol):
    """One attempt at a problem; it may keep state between turns.

    Example: an addition episode's `reply(())` returns (Message("user", "47+38="),), and its `reply` after the policy's completion
    returns (), which ends the episode.
    """

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message] | Conversation:
        """Return the environment's next messages: the opening, then its reply to each message of the policy.

        Args:
            messages: the conversation so far, the policy's message last; empty for the opening.

        Returns:
            The messages; none if the episode is over; or a Conversation, which replaces the one so far.
        """

    async def close(self) -> Mapping[str, object]:
        """End the episode; called once, however it ended. Returns JSON values that a scorer may read."""


@dataclass(frozen=True, slots=True)
class SingleTurn:
    """An episode that sends its opening messages and ends with the policy's first message."""

    opening: tuple[Message, ...]

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        return () if messages else self.opening

    async def close(self) -> Mapping[str, object]:
        return {}


class Environment(Protocol):
    """Produces problems and plays the episodes of their trajectories.

    Attributes:
        tools: JSON schemas of the tools, for the model's chat template.
        stop: texts of one token each that end the policy's turn like an end of sequence; they stay in the message.
    """

    # Properties, so that a class attribute of a narrower type, such as tools = (), fits.
    @property
    def name(self) -> str: ...

    @property
    def tools(self) -> Sequence[Mapping[str, object]]: ...

    @property
    def stop(self) -> Sequence[str]: ...

    def size(self, split: Split) -> int:
        """Return the number of problems in a split."""

    async def example(self, split: Split, index: int) -> Example:
        """Return the problem with this index, 0 <= index < size(split); the same one at every call."""

    def episode(self, example: Example, seed: int) -> Episode:
        """Start a new attempt at a problem; all its randomness derives from `seed`."""


def is_held_out(key: str) -> bool:
    """Return True for one problem in five, chosen by the crc32 of its key."""
    return zlib.crc32(key.encode()) % HELD_OUT_MODULUS == 0


def select_split(problems: Mapping[str, Problem], split: Split) -> tuple[Problem, ...]:
    """Return the problems of a split, one in five held out, in the order of their keys' crc32: the first n are a random sample."""
    ordered = sorted(problems, key=lambda key: zlib.crc32(key.encode()))
    return tuple(problems[key] for key in ordered if is_held_out(key) == (split == "held_out"))


@runtime_checkable
class WarmUp(Protocol):
    """An environment that can generate the warm-up corpus of a start model."""

    def warm_up_corpus(self, seed: int, n_examples: int) -> Sequence[Sequence[Message]]:
        """Return conversations about training problems, with the policy's messages filled in.

        The same arguments give the same conversations.
        """


@runtime_checkable
class Configurable(Protocol):
    """An environment class that is created from the settings of `rollout`."""

    def from_config(self, config: RolloutConfig, **arguments: Any) -> Environment:
        """Create the environment from the settings and the arguments that they give it; raise a ConfigError that names a wrong one."""


ENVIRONMENTS: Mapping[str, str] = {
    "agent": "rollmill.tasks.rollout.environments.agent:Agent",
    "addition": "rollmill.tasks.rollout.environments.addition:Addition",
    "calculator": "rollmill.tasks.rollout.environments.calculator:Calculator",
    "guess": "rollmill.tasks.rollout.environments.guess:Guess",
    "prompts": "rollmill.tasks.rollout.environments.prompts:Prompts",
    "openenv": "rollmill.tasks.rollout.environments.openenv_environment:OpenEnv",
    "nemo_gym": "rollmill.tasks.rollout.environments.nemo_gym_environment:NemoGym",
    "shell": "rollmill.tasks.rollout.environments.shell:Shell",
}
WITH_ARGUMENTS = ("nemo_gym", "openenv")
"""Names in ENVIRONMENTS of those that take arguments."""

LIBRARIES: Mapping[str, str] = {
    "verifiers": "rollmill.tasks.rollout.environments.verifiers.verifiers_environment:Verifiers"
}
"""Libraries whose environments are named LIBRARY:NAME; they are played in worker processes alone."""


def environment_library(config: RolloutConfig) -> str:
    """Return the library that the environment comes from; "" for none.

    Example: "verifiers" for `verifiers:textarena`.
    """
    library = config.environment.name.partition(":")[0]
    return library if library in LIBRARIES else ""


def needs_worker(config: RolloutConfig) -> bool:
    """Return True if the environment runs in worker processes alone: one of a library, or with programs or servers of others."""
    return bool(environment_library(config)) or config.environment.name in ("agent", "openenv", "nemo_gym")


def describe_environment_arguments(name: str) -> dict[str, Any]:
    """Return the JSON schema of the arguments of an environment in ENVIRONMENTS."""
    factory: Configurable = import_named("rollout.environment", name, ENVIRONMENTS)
    return make_argument_schema(factory.from_config, 1)


def make_environment(config: RolloutConfig) -> Environment:
    """Create an environment in this process, from its registered name or its import path `package.module:Class`.

    Names are those of Rollmill and those that installed distributions register.

    Raises:
        ConfigError: it cannot be imported, or not created from these settings and arguments.
    """
    field, name = "rollout.environment", config.environment.name
    registered = {**find_plugins("environments"), **ENVIRONMENTS}
    factory = import_named(field, LIBRARIES.get(environment_library(config), name), registered)
    with guard_named(field, name, registered):
        if isinstance(factory, Configurable):
            arguments = bind_arguments(field, factory.from_config, config.environment.args, 1)
            with name_arguments(field, config.environment.args):
                return factory.from_config(config, **arguments)
        arguments = bind_arguments(field, factory, config.environment.args)
        with name_arguments(field, config.environment.args):
            made: Environment = factory(**arguments)
    return made
