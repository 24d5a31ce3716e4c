"""The processes a run talks to, launched here or attached to."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from flows.config import RunConfig
from flows.ui.progress import say
from tasks.errors import ConfigError, ServiceDiedError
from tasks.observe.spans import span, within
from tasks.serve import vllm
from tasks.serve.client import VllmClient
from tasks.serve.process import LaunchedProcess, free_port
from tasks.serve.version import PolicyVersion
from tasks.train import launch
from tasks.train.client import TrainerClient
from tasks.train.config import TrainConfig
from tasks.train.rank_spans import process_of

LOOPBACK = "127.0.0.1"
OF_THE_FLOW = {
    *("url", "port", "token_env", "start_timeout_s", "step_timeout_s"),
    *("checkpoint_every", "keep_checkpoints", "keep_checkpoint_every", "export_every", "max_skipped_steps"),
    "recompute_rows",
}
"""Settings of `train` that the flow goes by, not the trainer."""


class TrainerService:
    """The trainer; `process` is None when it was attached to.

    Args:
        config: settings of the run.
        logs: folder for a launched trainer's log and configuration.
        variables: of its environment, besides ours.

    Attributes:
        spanned: what its processes are called in spans.
    """

    name = "trainer"

    def __init__(self, config: RunConfig, logs: Path, variables: Mapping[str, str]) -> None:
        settings = config.train
        self._config, self._logs, self._variables = config, logs, variables
        self._token = os.environ.get(settings.token_env, "") if settings.url else secrets.token_urlsafe(24)
        self._port = settings.port or free_port()
        if not self._token:
            remedy = "set this environment variable to the access token of the trainer at train.url"
            raise ConfigError("train.token_env", settings.token_env, remedy)
        url = settings.url or f"http://{LOOPBACK}:{self._port}"
        self.client = TrainerClient(url, self._token, timeout_s=settings.step_timeout_s)
        self.spanned = [process_of(rank) for rank in range(settings.ranks)]
        self.process: LaunchedProcess | None = None

    async def start(self) -> None:
        """Launch it if it is ours to launch, and wait until it answers.

        Raises:
            ServiceStartError: it did not answer in time, or ended.
        """
        settings = self._config.train
        if not settings.url:
            file = launch.write_config(settings, self._config.sync, self._port, self._logs)
            self.process = LaunchedProcess.start(
                self.name,
                launch.command(settings, file),
                log=self._logs / "trainer.log",
                env={**launch.environment(settings, self._token), **self._variables},
                stop_grace_s=self._config.serve.stop_grace_s,
            )
        health = await self.client.wait_until_healthy(settings.start_timeout_s, self.process)
        check_settings(settings, health.settings)


def check_settings(ours: TrainConfig, theirs: dict[str, Any]) -> None:
    """Refuse a trainer that was started with other settings of training than the run has; ConfigError names one."""
    for name, value in ours.model_dump(mode="json", exclude=OF_THE_FLOW).items():
        if theirs.get(name) != value:
            remedy = f"the trainer at train.url was started with {theirs.get(name)!r}: start it with the run's settings"
            raise ConfigError(f"train.{name}", value, remedy)


class ServerService:
    """One vLLM server; `process` is None when it was attached to.

    Args:
        config: settings of the run.
        model: folder of the model that a launched server starts with.
        logs: folder for a launched server's log, vllm-NUMBER.log.
        number: which of the run's servers it is, from 0.

    Attributes:
        spanned: what it is called in spans.
    """

    def __init__(self, config: RunConfig, model: Path, logs: Path, number: int) -> None:
        serve = config.serve
        self._config, self._model, self._logs, self._number = config, model, logs, number
        self._keeps_routing = config.rollout.keep_routing
        self.is_ours = not serve.urls
        self._port = serve.port + number if serve.port else free_port()
        url = f"http://{LOOPBACK}:{self._port}" if self.is_ours else serve.urls[number]
        self._key = os.environ.get(serve.api_key_env, "")
        if self.is_ours and not self._key:
            self._key = secrets.token_urlsafe(24)  # other users of this machine reach loopback too
        self.client = VllmClient(url, serve, self._key)
        self.name = f"vLLM server {self.client.url}"
        self.spanned = [self.client.url]
        self.process: LaunchedProcess | None = None

    async def start(self) -> None:
        """As for the trainer; it answers its first request here, which is slow."""
        serve = self._config.serve
        if self.is_ours:
            self.process = LaunchedProcess.start(
                self.name,
                vllm.command(serve, str(self._model), self._port, returns_routing=self._keeps_routing),
                log=self._logs / f"vllm-{self._number}.log",
                env=vllm.environment(serve, self._number, api_key=self._key),
                stop_grace_s=serve.stop_grace_s,
            )
        await self.client.wait_until_healthy(serve.start_timeout_s, self.process)
        await self.client.warm_up(self.process, needs_routing=self._keeps_routing)

    async def failed(self, alarm: asyncio.Event) -> str:
        """Wait until it fails, or an alarm asks to look; returns how it failed, nothing after an alarm."""
        health = asyncio.ensure_future(self._refused())
        alarmed = asyncio.ensure_future(alarm.wait())
        end = asyncio.ensure_future(self.process.ended()) if self.process else None
        waits = {health, alarmed} | ({end} if end else set())
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.process is not None and not self.process.is_running:
            return f"its process ended with status {self.process.returncode}"
        return "it no longer answers /health" if health.done() else ""

    async def answers(self, *, must_sample: bool) -> None:
        """Wait until an attached server that was gone answers; one that was started anew gets its first request.

        Args:
            must_sample: True for one that answered /health all the time and failed generations.
        """
        while not await self._is_back(must_sample):  # noqa: ASYNC110 - nobody tells when it is back
            await asyncio.sleep(self._config.serve.health_interval_s)
        if not PolicyVersion.is_one(await self.client.version()):
            await self.client.warm_up(needs_routing=self._keeps_routing)

    async def _is_back(self, must_sample: bool) -> bool:
        return await self.client.is_healthy() and (not must_sample or await self.client.can_sample())

    async def _refused(self) -> None:
        while await self.client.is_healthy():  # noqa: ASYNC110 - a failing server tells nobody
            await asyncio.sleep(self._config.serve.health_interval_s)


async def restart(
    service: TrainerService | ServerService, reason: str, restarts: int, max_restarts: int
) -> None:
    """End what is left of a launched service, and start it again; its time meanwhile is `starting`.

    Raises:
        ServiceDiedError: it was attached to, or has been restarted too often.
    """
    if service.process is None:
        raise ServiceDiedError(
            service.name, f"{reason}; it was not launched by this run: bring it back and run again"
        )
    tail = service.process.log_tail()
    await service.process.stop()
    if restarts >= max_restarts:
        raise ServiceDiedError(
            service.name, f"{reason}, after {restarts} restarts (serve.max_restarts)", tail
        )
    say(f"{service.name}: {reason.splitlines()[0]}; starting it again")
    with _starting_again(service):
        await service.start()


@contextmanager
def _starting_again(service: TrainerService | ServerService) -> Iterator[None]:
    """Book the time to its processes, which cannot tell of it themselves."""
    with ExitStack() as spans:
        for process in service.spanned:
            with within(process=process, lane="process"):
                spans.enter_context(span("starting", cause="restart"))
        yield


@asynccontextmanager
async def open_services(
    config: RunConfig, model: Path, logs: Path, *, with_servers: bool, variables: Mapping[str, str] = {}
) -> AsyncIterator[tuple[TrainerService, tuple[ServerService, ...]]]:
    """Start the trainer, and the servers if asked for, side by side; on the way out, however it is taken, what was launched ends.

    `variables` are those of the trainer's environment, besides ours.
    """
    trainer = TrainerService(config, logs, variables)
    servers = servers_of(config, model, logs) if with_servers else ()
    async with started((trainer, *servers)):
        yield trainer, servers


@asynccontextmanager
async def open_servers(
    config: RunConfig, model: Path, logs: Path
) -> AsyncIterator[tuple[ServerService, ...]]:
    """As `open_services`, without a trainer."""
    servers = servers_of(config, model, logs)
    async with started(servers):
        yield servers


def servers_of(config: RunConfig, model: Path, logs: Path) -> tuple[ServerService, ...]:
    """The vLLM servers that a run samples from, not yet started."""
    n_servers = len(config.serve.urls) or config.serve.servers
    return tuple(ServerService(config, model, logs, number) for number in range(n_servers))


@asynccontextmanager
async def started(every: Sequence[TrainerService | ServerService]) -> AsyncIterator[None]:
    """Start services side by side; on the way out, however it is taken, what was launched ends."""
    try:
        with span("starting", cause="services"):
            async with asyncio.TaskGroup() as starting:
                for service in every:
                    starting.create_task(service.start())
        yield
    finally:
        with span("stopping", cause="services"):
            await asyncio.gather(*(service.client.close() for service in every))
            await asyncio.gather(*(service.process.stop() for service in every if service.process))
