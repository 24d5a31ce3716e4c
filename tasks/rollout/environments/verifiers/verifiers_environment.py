"""Environments of the `verifiers` library by name, unmodified, with their tool servers: `rollout.environment: verifiers:NAME`.

They always run in worker processes: the library takes six seconds and 200 MB to import.
"""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Self

from rollmill.tasks.errors import ConfigError, EpisodeError
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment import Example, Split
from rollmill.tasks.rollout.environments.endpoint.chat_wire import MODEL, Said, Wire
from rollmill.tasks.rollout.environments.endpoint.policy_endpoint import PolicyEndpoint
from rollmill.tasks.rollout.environments.endpoint.requesting_episode import (
    AskPolicy,
    RequestingEpisode,
    RolloutEnd,
)
from rollmill.tasks.rollout.environments.verifiers.loading import (
    FIELD,
    PREFIX,
    library_versions,
    load_environments,
    offers_tools,
    parse_state_columns,
    read_state_values,
    select_tasks,
)

# A variable that is not set: the endpoint needs no key, and must not receive one of the user's keys.
KEY_VARIABLE = "ROLLMILL_POLICY_API_KEY"


class RolloutServer:
    """Runs episodes of one environment, with its tool servers, interception proxy and policy endpoint.

    The first episode starts the servers.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._endpoint = PolicyEndpoint()
        self._held: asyncio.Task[None] | None = None
        self._up: asyncio.Future[None]
        self._over: asyncio.Event

    async def play(
        self,
        task: Any,
        asked: AskPolicy,
        version: str,
        states: Mapping[str, str],
    ) -> RolloutEnd:
        """Run one episode of a problem, a task of the library, to its end and return how it ended.

        `asked` is called with the trace's id and each request, and returns the policy's next message. `version` names the
        packages in the outcome; `states` has the type of each state column to keep.
        """
        await self._is_up()
        known: set[str] = set()
        asking: set[str] = set()

        def register_trace(trace: Any) -> None:
            async def ask(request: Wire) -> Said:
                asking.add(trace.id)
                return await asked(trace.id, request)

            known.add(trace.id)
            # The library sends a trace's id in the header X-Session-ID.
            self._endpoint.asked[trace.id] = ask

        try:
            record = await self._environment.run_episode(task, self._context(), on_trace=register_trace)
        finally:
            for trace_id in known:
                del self._endpoint.asked[trace_id]
        trace = next((each for each in record.traces if each.id in asking), None)
        return replace(
            rollout_end_from_record(record, asking, version), state=read_state_values(trace, states)
        )

    async def aclose(self) -> None:
        """Stop the tool servers, the proxy and the policy endpoint if they run."""
        if self._held is not None:
            self._over.set()
            await self._held
            self._held = None

    def _context(self) -> Any:
        from verifiers.v1 import EvalClientConfig, ModelContext

        client = EvalClientConfig(base_url=f"{self._endpoint.url}/v1", api_key_var=KEY_VARIABLE)
        return ModelContext(model=MODEL, client=client)

    async def _is_up(self) -> None:
        if self._held is None:
            self._up, self._over = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._held = asyncio.create_task(self._hold())
        await asyncio.shield(self._up)

    async def _hold(self) -> None:
        """Open the servers, wait for `aclose`, and close them, all in one asyncio task.

        The library's contexts must be left by the task that entered them.
        """
        try:
            async with self._endpoint, self._environment.serving():
                self._up.set_result(None)
                await self._over.wait()
        except Exception as error:
            if self._up.done():
                raise
            self._up.set_exception(error)
            self._held = None


def rollout_end_from_record(record: Any, asking: set[str], version: str) -> RolloutEnd:
    """Return how an episode ended, from the trace of the policy's agent in the library's record of the episode.

    After an error before scoring the outcome is empty and `error` is set; after an error of scoring the outcome has `error`
    instead of `reward`. `asking` has the ids of the traces that requested a message of the policy.
    """
    trace = next((each for each in record.traces if each.id in asking), None)
    if trace is None:
        errors = [*record.errors, *(error for each in record.traces for error in each.errors)]
        why = f": {_error_text(errors[-1])}" if errors else " and ended"
        return RolloutEnd({}, f"the environment never requested a completion{why}")
    outcome = {
        "reward": trace.reward,
        "rewards": {name: part and part.value for name, part in trace.rewards.items()},
        "metrics": dict(trace.metrics),
        "stop": trace.stop_condition,
        "version": version,
    }
    error = record.last_error or (None if trace.ok else trace.last_error)
    if error is None:
        return RolloutEnd(outcome)
    if not trace.timing.scoring.start:
        return RolloutEnd({}, _error_text(error))
    del outcome["reward"]
    return RolloutEnd(outcome | {"error": _error_text(error)})


def _error_text(error: Any) -> str:
    return f"{error.type}: {error.message}"


class Verifiers:
    """Environment of the `verifiers` library, with the problems of its task set.

    Args:
        name: the library's name of the environment: NAME, or OWNER/NAME.
        arguments: the library's configuration of an environment ("taskset", "agent", ...), with two more keys: "select"
            chooses problems, and "held_out" overrides settings of the task set for held-out problems.
        states: Arrow type of each value to keep from the state (or info) of a rollout.
    """

    stop: Sequence[str] = ()

    def __init__(
        self, name: str, arguments: Mapping[str, Any], states: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.name = f"{PREFIX}{name}"
        self.states = states
        environments = load_environments(name, arguments)
        self._tasks = select_tasks(environments, arguments)
        servings = {each: RolloutServer(each) for each in environments.values()}
        self._serving = {split: servings[each] for split, each in environments.items()}
        self._version = library_versions(environments["train"])
        self.tools: Sequence[Wire] = ()
        if any(map(offers_tools, servings)):
            # This thread may already run an event loop.
            with ThreadPoolExecutor(1) as thread:
                self.tools = thread.submit(asyncio.run, self._first_tools()).result()

    @classmethod
    def from_config(cls, config: RolloutConfig, **arguments: Any) -> Self:
        """Make the environment that `rollout.environment` names, with the library's configuration as its arguments.

        Raises:
            ConfigError: the library or the environment is not installed, or an argument is wrong.
        """
        states = parse_state_columns(config.keep_states)
        return cls(config.environment.name.removeprefix(PREFIX), arguments, states)

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

    def episode(self, example: Example, seed: int) -> RequestingEpisode:
        """Return a new episode of a problem; `seed` is unused, since the library accepts none."""
        return self._episode(example.content["split"], example.content["index"], self.tools)

    async def aclose(self) -> None:
        """Stop tool servers and endpoints; they also stop when the event loop ends."""
        for serving in self._serving.values():
            await serving.aclose()

    def _episode(self, split: Any, index: Any, tools: Sequence[Wire] | None) -> RequestingEpisode:
        task, serving = self._tasks[split][index], self._serving[split]

        async def play(asked: AskPolicy) -> RolloutEnd:
            return await serving.play(task, asked, self._version, self.states)

        return RequestingEpisode(play, tools)

    async def _first_tools(self) -> Sequence[Wire]:
        """Return the tools that a rollout of the first training problem offers.

        The rollout is started for this, because the library lists all tools only in a running rollout.

        Raises:
            ConfigError: the rollout does not start.
        """
        episode = self._episode("train", 0, None)
        try:
            await episode.reply(())
        except EpisodeError as error:
            remedy = f"its tools are unknown, because its first problem does not start: {error}"
            raise ConfigError(FIELD, self.name, remedy) from error
        finally:
            await episode.close()
            await self.aclose()
        return episode.tools or ()
