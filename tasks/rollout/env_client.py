"""An environment for the flow: in its own process, or in worker processes that can do it no harm."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path

from tasks.errors import EnvironmentDiedError, EpisodeError, ForeignError, ServiceError, ToolError
from tasks.observe.retries import retries
from tasks.rollout.config import RolloutConfig
from tasks.rollout.env_messages import (
    CloseAnswer,
    Description,
    ExampleAnswer,
    ExampleRequest,
    Raised,
    Turn,
    TurnAnswer,
)
from tasks.rollout.env_process import EnvWorker, Launch
from tasks.rollout.env_workers import EnvWorkers
from tasks.rollout.environment import (
    Environment,
    Episode,
    Example,
    Message,
    Split,
    environment_of,
    library_of,
)
from tasks.rollout.state import NO_STATE, EpisodeState

OWN_ERRORS: Mapping[str, type[EpisodeError]] = {each.__name__: each for each in (EpisodeError, ToolError)}

EXAMPLE_ATTEMPTS = 5


@asynccontextmanager
async def open_environment(
    config: RolloutConfig, *, logs: Path, stop_grace_s: float
) -> AsyncIterator[Environment]:
    """The environment of the settings, with `rollout.env_workers` processes that end with this context.

    An environment of a library has one at least.

    Args:
        config: which environment, in how many workers.
        logs: folder for the workers' logs.
        stop_grace_s: seconds between asking a worker to end and killing it.

    Raises:
        ConfigError: it cannot be made from these settings (in this process).
        ServiceStartError: a worker did not start, with its last log lines.
    """
    n_workers = config.env_workers or int(bool(library_of(config)))
    if not n_workers:
        yield environment_of(config)
        return
    workers = EnvWorkers(Launch(config, _write_settings(config, logs), logs, stop_grace_s))
    keeping: asyncio.Task[None] | None = None
    try:
        description = await _started(workers, n_workers)
        keeping = asyncio.create_task(workers.keep())
        yield RemoteEnvironment(description, workers)
    finally:
        if keeping is not None:
            keeping.cancel()
            with suppress(asyncio.CancelledError):
                await keeping
        await workers.stop()


def _write_settings(config: RolloutConfig, logs: Path) -> Path:
    """The settings as LOGS/environment.json, for the workers to read."""
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / "environment.json"
    path.write_text(config.model_dump_json(indent=2))
    return path


async def _started(workers: EnvWorkers, n_workers: int) -> Description:
    """Start them; of several that did not, the first one's error."""
    try:
        return await workers.start(n_workers)
    except* ServiceError as failed:
        first = next(each for each in failed.exceptions if isinstance(each, ServiceError))
    raise first


class RemoteEnvironment:
    """An Environment whose problems and episodes live in worker processes."""

    def __init__(self, description: Description, workers: EnvWorkers) -> None:
        self.name, self._sizes, self._workers = description.name, description.sizes, workers
        self.tools: Sequence[Mapping[str, object]] = description.tools
        self.stop: Sequence[str] = description.stop
        self.states: Mapping[str, str] = description.states
        self._episode_ids = count()

    @property
    def restarts(self) -> int:
        """How many workers were started again because they failed."""
        return self._workers.restarts

    def size(self, split: Split) -> int:
        return self._sizes[split]

    async def example(self, split: Split, index: int) -> Example:
        """See Environment; asked of another worker when one fails meanwhile."""
        asking = retries(EnvironmentDiedError, attempts=EXAMPLE_ATTEMPTS, backoff_s=0.0, longest_s=0.0)
        async for attempt in asking:
            with attempt:
                answer = await self._example(ExampleRequest(split, index))
        if answer.value is None:
            raise _error(answer.raised or Raised("EpisodeError", "no example"))
        return answer.value

    async def _example(self, wanted: ExampleRequest) -> ExampleAnswer:
        worker = await self._workers.take(n_episodes=0)
        try:
            return await worker.ask("/example", wanted, ExampleAnswer)
        finally:
            worker.closed(n_ended=0)

    def episode(self, example: Example, seed: int) -> Episode:
        return RemoteEpisode(f"/episodes/{next(self._episode_ids)}", example, seed, self._workers)


class RemoteEpisode:
    """An Episode in a worker, the same one from its first turn to its end."""

    def __init__(self, path: str, example: Example, seed: int, workers: EnvWorkers) -> None:
        self._path, self._example, self._seed, self._workers = path, example, seed, workers
        self._worker: EnvWorker | None = None
        self._state = NO_STATE

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        if self._worker is None:
            self._worker = await self._workers.take()
        answer: TurnAnswer | None = None
        try:
            turn = Turn(self._example, self._seed, messages)
            answer = await self._worker.ask(f"{self._path}/reply", turn, TurnAnswer)
        finally:
            if (
                answer is None or answer.raised
            ):  # the worker closes an episode whose turn failed, or was given up
                self._release(n_ended=int(answer is not None))
        if answer.raised is not None:
            raise _error(answer.raised)
        return answer.value

    async def close(self) -> Mapping[str, object]:
        if self._worker is None:
            return {}
        answer: CloseAnswer | None = None
        try:
            answer = await self._worker.ask(f"{self._path}/close", None, CloseAnswer)
        finally:
            self._release(n_ended=int(answer is not None))
        self._state = EpisodeState(answer.state, answer.state_error)
        if answer.raised is not None:
            raise _error(answer.raised)
        return answer.value

    def state(self) -> Mapping[str, object]:
        """What came with the answer to `close`."""
        if self._state.error:
            raise EpisodeError(self._state.error)
        return self._state.values

    def _release(self, *, n_ended: int) -> None:
        if self._worker is not None:
            self._worker.closed(n_ended)
            self._worker = None


def _error(raised: Raised) -> EpisodeError:
    """What an environment raised in its worker, under its own type where it is one of ours."""
    kind = OWN_ERRORS.get(raised.kind)
    return kind(raised.text) if kind is not None else ForeignError(raised.kind, raised.text)
