"""Environments of the `verifiers` library by name, unmodified: `rollout.environment: verifiers:NAME`.

They are always played in worker processes: the library takes six seconds to import and 200 MB.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, Self

from tasks.errors import ConfigError, EpisodeError
from tasks.rollout.config import RolloutConfig
from tasks.rollout.environment import Example, Split
from tasks.rollout.verifiers_episode import Finished, VerifiersEpisode
from tasks.rollout.verifiers_load import (
    FIELD,
    PREFIX,
    arguments_of,
    environments_of,
    offers_tools,
    tasks_of,
    versions_of,
)
from tasks.rollout.verifiers_serving import Serving
from tasks.rollout.verifiers_state import kept_states
from tasks.rollout.verifiers_wire import Wire


class Verifiers:
    """An environment of the library, and the problems of its task set.

    Args:
        name: of the environment, as the library takes it: NAME, or OWNER/NAME.
        arguments: the library's configuration of an environment ("taskset", "agent", ...), and beside it "select",
            which problems, and "held_out", settings of the task set in which held-out problems differ.
        states: Arrow type of each name in the library's state (or info) of a rollout that is kept.
    """

    stop: Sequence[str] = ()

    def __init__(
        self, name: str, arguments: Mapping[str, Any], states: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.name = f"{PREFIX}{name}"
        self.states = states
        environments = environments_of(name, arguments)
        self._tasks = tasks_of(environments, arguments)
        servings = {each: Serving(each) for each in environments.values()}
        self._serving = {split: servings[each] for split, each in environments.items()}
        self._version = versions_of(environments["train"])
        self.tools: Sequence[Wire] = ()
        if any(map(offers_tools, servings)):
            with ThreadPoolExecutor(1) as thread:  # for a loop of its own: this thread may have one that runs
                self.tools = thread.submit(asyncio.run, self._first_tools()).result()

    @classmethod
    def from_config(cls, config: RolloutConfig) -> Self:
        """Make the environment that `rollout.environment` names, with `rollout.environment_args`.

        Raises:
            ConfigError: the library or the environment is not installed, or an argument is wrong.
        """
        arguments, states = arguments_of(config.environment_args), kept_states(config.keep_states)
        return cls(config.environment.removeprefix(PREFIX), arguments, states)

    def size(self, split: Split) -> int:
        return len(self._tasks[split])

    async def example(self, split: Split, index: int) -> Example:
        data = self._tasks[split][index].data
        content = {
            "split": split,
            "index": index,
            "task": data.model_dump(mode="json", exclude_defaults=True),
        }
        return Example(str(data.id or data.name or data.idx), content)

    def episode(self, example: Example, seed: int) -> VerifiersEpisode:
        """A new rollout; what is random in it is the environment's affair: the library has no seed to give it."""
        return self._episode(example.content["split"], example.content["index"], self.tools)

    async def aclose(self) -> None:
        """End tool servers and endpoint; the end of the event loop does it too."""
        for serving in self._serving.values():
            await serving.aclose()

    def _episode(self, split: Any, index: Any, tools: Sequence[Wire] | None) -> VerifiersEpisode:
        task, serving = self._tasks[split][index], self._serving[split]

        async def play(asked: Callable[[str, Wire], Awaitable[Wire]]) -> Finished:
            return await serving.play(task, asked, self._version, self.states)

        return VerifiersEpisode(play, tools)

    async def _first_tools(self) -> Sequence[Wire]:
        """The tools that the first problem's rollout offers: only a rollout that runs knows them all."""
        episode = self._episode("train", 0, None)
        try:
            await episode.reply(())
        except EpisodeError as error:
            remedy = f"its tools cannot be asked for, since its first problem does not start: {error}"
            raise ConfigError(FIELD, self.name, remedy) from error
        finally:
            await episode.close()
            await self.aclose()
        return episode.tools or ()
