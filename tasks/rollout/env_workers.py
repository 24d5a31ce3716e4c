"""The worker processes of an environment: a number of them kept up, episodes spread over them."""

import asyncio
from collections.abc import Coroutine

from tasks.errors import ServiceDiedError, ServiceError
from tasks.observe.spans import span
from tasks.rollout.env_messages import Description
from tasks.rollout.env_process import EnvWorker, Launch


class EnvWorkers:
    """Workers that are up; one that fails, or has had its episodes, is followed by another.

    Attributes:
        restarts: how many were started again because they failed.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._alive: set[EnvWorker] = set()
        self._up: dict[int, EnvWorker] = {}
        self._changed = asyncio.Event()
        self._failure: ServiceError | None = None
        self.restarts = 0

    async def start(self, n_workers: int) -> Description:
        """Start them side by side; returns what the environment is.

        Raises:
            ServiceStartError: one did not start.
        """
        async with asyncio.TaskGroup() as starting:
            tasks = [starting.create_task(self._start(number)) for number in range(n_workers)]
        return tasks[0].result()

    async def keep(self) -> None:
        """Keep the started ones up until cancelled; when one fails too often, `take` raises it from then on."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in tuple(self._up):
                    tasks.create_task(self._keep(number, tasks))
        except* (ServiceError, OSError) as failed:
            self._failure = _service_error(failed)
            self._changed.set()

    async def take(self, n_episodes: int = 1) -> EnvWorker:
        """The worker with the fewest open episodes, for one more, or for a problem (0); waits while none is up.

        Raises:
            ServiceError: a worker failed too often, or could not be started again.
        """
        if not self._can_take:
            with span("waiting_for_environment", cause="no worker"):
                await self._some_up()
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)
        open_ones = [worker for worker in self._up.values() if worker.is_open]
        worker = min(open_ones, key=lambda each: (each.n_open, each.n_taken))
        worker.opened(n_episodes)
        return worker

    @property
    def _can_take(self) -> bool:
        return self._failure is not None or any(worker.is_open for worker in self._up.values())

    async def _some_up(self) -> None:
        while not self._can_take:
            self._changed.clear()
            await self._changed.wait()

    async def stop(self) -> None:
        """End all of them."""
        await asyncio.gather(*(worker.stop("was ended with the run") for worker in self._alive))

    async def _start(self, number: int) -> Description:
        worker, description = await EnvWorker.start(number, self._launch, self._changed)
        self._alive.add(worker)
        self._up[number] = worker
        self._changed.set()
        return description

    async def _end(self, worker: EnvWorker, reason: str) -> None:
        await worker.stop(reason)
        self._alive.discard(worker)

    async def _keep(self, number: int, tasks: asyncio.TaskGroup) -> None:
        """Follow one worker after the other."""
        failures_in_a_row = 0
        while True:
            worker = self._up[number]
            reason = await _first(worker.failed(), worker.is_full)
            del self._up[number]
            if not reason:
                tasks.create_task(self._drain(worker))
            else:
                await self._end(worker, reason)
                self.restarts += 1
                failures_in_a_row = 0 if worker.n_ended else failures_in_a_row + 1
                most = self._launch.config.env_max_restarts
                if failures_in_a_row > most:
                    reason += (
                        f", and so did {most} before it without ending one episode (rollout.env_max_restarts)"
                    )
                    raise ServiceDiedError(worker.name, reason, worker.log_tail())
            await self._start(number)

    async def _drain(self, worker: EnvWorker) -> None:
        """End a worker when its last episode is over, or it fails."""
        reason = await _first(worker.failed(), worker.is_empty)
        await self._end(worker, reason or "has had its episodes")


async def _first(failed: Coroutine[None, None, str], event: asyncio.Event) -> str:
    """Wait for a failure or an event; returns the failure in words, nothing when it is the event."""
    failure, happened = asyncio.ensure_future(failed), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([failure, happened], return_when=asyncio.FIRST_COMPLETED)
        return failure.result() if failure.done() else ""
    finally:
        failure.cancel()
        happened.cancel()


def _service_error(failed: BaseExceptionGroup[BaseException]) -> ServiceError:
    """The first error of a group; the operating system's are those of a worker that it would not start."""
    first = failed.exceptions[0]
    return first if isinstance(first, ServiceError) else ServiceDiedError("environment workers", str(first))
