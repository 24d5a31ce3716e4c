"""Open an environment for the flow: in its own process, or in isolated worker processes."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path

import msgspec

from rollmill.tasks.errors import (
    EpisodeError,
    ForeignError,
    RollmillError,
    ToolError,
    WorkerDiedError,
)
from rollmill.tasks.observe.retries import Retries
from rollmill.tasks.processes.launched_process import STOP_GRACE_S
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment import (
    Conversation,
    Environment,
    Episode,
    Example,
    Message,
    Split,
    TokenCounts,
    make_environment,
    needs_worker,
)
from rollmill.tasks.rollout.environment_calls import NO_STATE, EpisodeState
from rollmill.tasks.rollout.environment_messages import (
    ClosedEpisode,
    CloseRequest,
    EnvironmentDescription,
    ExampleRequest,
    TurnReply,
    TurnRequest,
)
from rollmill.tasks.rollout.environment_pool import Answer, EnvironmentPool, EnvironmentWorker

OWN_ERRORS: Mapping[str, type[EpisodeError]] = {each.__name__: each for each in (EpisodeError, ToolError)}

EXAMPLE_ATTEMPTS = 5


@asynccontextmanager
async def open_environment(
    config: RolloutConfig, *, logs: Path, stop_grace_s: float = STOP_GRACE_S
) -> AsyncIterator[Environment]:
    """Open the configured environment: in worker processes that end with this context, or in this process.

    There are `rollout.env_workers` processes. With 0 the environment is in this process; one that others wrote (`needs_worker`)
    then gets one process. Arguments as for `EnvironmentPool`.

    Raises:
        ConfigError: it cannot be created from these settings (in this process).
        ServiceStartError: a worker did not start; with its last log lines.
    """
    n_workers = config.env_workers or int(needs_worker(config))
    if not n_workers:
        yield make_environment(config)
        return
    workers = EnvironmentPool(config, logs, stop_grace_s)
    keeping: asyncio.Task[None] | None = None
    try:
        description = await workers.start(n_workers)
        keeping = asyncio.create_task(workers.keep())
        yield RemoteEnvironment(description, workers)
    finally:
        if keeping is not None:
            keeping.cancel()
            with suppress(asyncio.CancelledError):
                await keeping
        await workers.stop()


class RemoteEnvironment:
    """An Environment whose problems and episodes are in worker processes."""

    def __init__(self, description: EnvironmentDescription, workers: EnvironmentPool) -> None:
        self.name, self._sizes, self._workers = description.name, description.sizes, workers
        self.tools: Sequence[Mapping[str, object]] = description.tools
        self.stop: Sequence[str] = description.stop
        self.states: Mapping[str, str] = description.states
        self._episode_ids = count()

    @property
    def restarts(self) -> int:
        """Number of workers replaced because they failed."""
        return self._workers.restarts

    def size(self, split: Split) -> int:
        return self._sizes[split]

    async def example(self, split: Split, index: int) -> Example:
        """Return a problem of a split from a worker; if that worker dies, ask another one, up to five times in all."""
        asking = Retries(WorkerDiedError, attempts=EXAMPLE_ATTEMPTS, backoff_s=0.0, longest_s=0.0)
        async for attempt in asking:
            with attempt:
                worker = await self._workers.take(n_episodes=0)
                try:
                    return await worker.ask(ExampleRequest(split, index), Example)
                except ForeignError as error:
                    raise _restore_error(error) from None
                finally:
                    worker.end_request(n_ended=0)
        raise AssertionError("the last attempt raises")

    def episode(self, example: Example, seed: int) -> Episode:
        return RemoteEpisode(next(self._episode_ids), example, seed, self._workers)


class RemoteEpisode:
    """An Episode in a worker process; all its turns run in the same worker."""

    def __init__(self, number: int, example: Example, seed: int, workers: EnvironmentPool) -> None:
        self._number, self._example, self._seed, self._workers = number, example, seed, workers
        self._worker: EnvironmentWorker | None = None
        self._state = NO_STATE
        self._counts: TokenCounts | None = None
        self._cut: Message | None = None

    def take_counts(self, counts: TokenCounts) -> None:
        self._counts = counts

    def take_cut(self, message: Message) -> None:
        self._cut = message

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message] | Conversation:
        if self._worker is None:
            self._worker = await self._workers.take()
        turn = TurnRequest(self._number, self._example, self._seed, messages, self._counts)
        return (await self._ask(self._worker, turn, TurnReply, is_last=False)).reply()

    async def close(self) -> Mapping[str, object]:
        if self._worker is None:
            return {}
        request = CloseRequest(self._number, self._cut, self._counts)
        closed = await self._ask(self._worker, request, ClosedEpisode, is_last=True)
        self._state = EpisodeState(closed.state, closed.state_error)
        if closed.raised is not None:
            raise _restore_error(ForeignError(*closed.raised))
        return closed.outcome

    def state(self) -> Mapping[str, object]:
        """Return the episode's state, which the worker sent when the episode was closed; empty before that.

        Raises:
            EpisodeError: the worker reported an error of the state.
        """
        if self._state.error:
            raise EpisodeError(self._state.error)
        return self._state.values

    async def _ask(
        self, worker: EnvironmentWorker, request: msgspec.Struct, answer: type[Answer], *, is_last: bool
    ) -> Answer:
        # The worker closes an episode whose turn failed or was cancelled.
        is_over, n_ended = True, 0
        try:
            given = await worker.ask(request, answer)
            is_over, n_ended = is_last, int(is_last)
        except ForeignError as error:
            n_ended = 1
            raise _restore_error(error) from None
        finally:
            if is_over:
                worker.end_request(n_ended)
                self._worker = None
        return given


def _restore_error(raised: ForeignError) -> RollmillError:
    """Return a worker's exception as EpisodeError or ToolError if it is one of these; return others unchanged."""
    kind = OWN_ERRORS.get(raised.kind)
    return raised if kind is None else kind(raised.text)
