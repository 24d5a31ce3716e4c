"""The trainer and the vLLM servers of a run, launched by it or attached to."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from rollmill.flows.checks.gpu_assignment import assign_run_gpus
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.environments import environment_configs
from rollmill.flows.configuration.settings import SETTINGS_BY_STEP, settings
from rollmill.flows.prefect_integration.progress import say
from rollmill.tasks.errors import ConfigError, ServiceDiedError, ServiceStartError
from rollmill.tasks.observe.spans import span, within
from rollmill.tasks.processes.gpus import GpuAssignment
from rollmill.tasks.processes.launched_process import LaunchedProcess, free_port
from rollmill.tasks.serve import vllm_launch
from rollmill.tasks.serve.policy_version import PolicyVersion
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.store.run.immutable_settings import get_setting
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.service import launch
from rollmill.tasks.train.service.rank_spans import rank_process
from rollmill.tasks.train.service.trainer_client import TrainerClient

LOOPBACK = "127.0.0.1"
# Seconds between two health checks of a server: a dead one is noticed before its requests time out.
HEALTH_INTERVAL_S = 2.0
# Seconds within which an attached service that failed must be back: enough for an operator to replace it.
RETURN_TIMEOUT_S = 1800.0
# Settings of `train` that the flow uses, not the trainer, so that an attached trainer may have others.
FLOW_SETTINGS = (
    "train.url",
    "train.gpus",
    "train.command_timeout_s",
    "train.max_skipped_steps",
    "train.kl.urls",
)


class TrainerService:
    """The trainer's process and client; `process` is None if the trainer was not launched by this run.

    Args:
        config: settings of the run.
        logs: folder for a launched trainer's log and configuration.
        variables: added to its environment.
        gpus: of a launched trainer, as CUDA_VISIBLE_DEVICES; empty: what this process sees.

    Attributes:
        span_processes: names of its processes in spans.
    """

    name = "trainer"

    def __init__(self, config: RunConfig, logs: Path, variables: Mapping[str, str], gpus: str = "") -> None:
        settings = config.train
        self._config, self._logs, self._variables, self._gpus = config, logs, variables, gpus
        self._token = os.environ.get(launch.TOKEN_ENV, "") if settings.url else secrets.token_urlsafe(24)
        self._port = free_port()
        if not self._token:
            remedy = "set this environment variable to the access token of the trainer at train.url"
            raise ConfigError(launch.TOKEN_ENV, "", remedy)
        url = settings.url or f"http://{LOOPBACK}:{self._port}"
        self.client = TrainerClient(url, self._token, timeout_s=settings.command_timeout_s)
        self.span_processes = [rank_process(rank) for rank in range(settings.ranks)]
        self.process: LaunchedProcess | None = None

    async def start(self) -> None:
        """Launch the trainer, unless train.url is set, and wait until it answers.

        Raises:
            ServiceStartError: it did not answer in time, or ended.
            ConfigError: an attached trainer was started with other training settings than the run's.
        """
        settings = self._config.train
        if not settings.url:
            file = launch.write_config(settings, self._config.sync, self._port, self._logs)
            self.process = LaunchedProcess.start(
                self.name,
                launch.build_command(settings, file),
                log=self._logs / "trainer.log",
                env={**launch.build_environment(settings, self._token, gpus=self._gpus), **self._variables},
            )
        health = await self.client.wait_until_healthy(self._config.start_timeout_s, self.process)
        check_settings(settings, health.settings)

    async def wait_for_return(self, reason: str) -> None:
        """Wait until an attached trainer that failed answers again; it has no policy loaded then.

        Raises:
            ServiceDiedError: it did not within RETURN_TIMEOUT_S; `reason` is why it failed.
            ConfigError: it came back with other training settings than the run's.
        """
        say(f"{self.name}: {reason.splitlines()[0]}; waiting {RETURN_TIMEOUT_S:g} s for its return")
        try:
            health = await self.client.wait_until_healthy(RETURN_TIMEOUT_S)
        except ServiceStartError as error:
            text = (
                f"{reason}; it was not launched by this run and did not return within {RETURN_TIMEOUT_S:g} s"
            )
            raise ServiceDiedError(self.name, f"{text}: restart it, then run the same command") from error
        check_settings(self._config.train, health.settings)


def check_settings(ours: TrainConfig, theirs: dict[str, Any]) -> None:
    """Raise ConfigError, which names a setting, if a trainer was started with other training settings than the run's.

    Settings that each step is sent with, such as the learning rate, may differ.
    """
    values = {"train": ours.model_dump(mode="json")}
    for name in settings():
        if not name.startswith("train.") or name in {*FLOW_SETTINGS, *SETTINGS_BY_STEP}:
            continue
        value, other = get_setting(values, name, None), get_setting({"train": theirs}, name, None)
        if value != other:
            remedy = f"the trainer at train.url was started with {other!r}: start it with the run's settings"
            raise ConfigError(name, value, remedy)


class ServerService:
    """A vLLM server's process and client; `process` is None if the server was not launched by this run.

    Args:
        config: settings of the run.
        model: folder of the model that a launched server starts with.
        logs: folder for a launched server's log, vllm-NUMBER.log.
        number: its number among the run's servers, from 0.
        gpus: of a launched server, as CUDA_VISIBLE_DEVICES; empty: what this process sees.
        variables: added to a launched server's environment.

    Attributes:
        span_processes: its name in spans.
    """

    def __init__(
        self,
        config: RunConfig,
        model: Path,
        logs: Path,
        number: int,
        gpus: str = "",
        variables: Mapping[str, str] = {},
    ) -> None:
        serve = config.serve
        self._config, self._model, self._logs, self._number = config, model, logs, number
        self._gpus, self._variables = gpus, variables
        self._keeps_routing = config.rollout.keep_routing
        self.is_ours = not serve.urls
        self._port = free_port()
        url = f"http://{LOOPBACK}:{self._port}" if self.is_ours else serve.urls[number]
        self._key = os.environ.get(vllm_launch.API_KEY_ENV, "")
        if self.is_ours and not self._key:
            # Other users of this machine reach loopback too.
            self._key = secrets.token_urlsafe(24)
        self.client = VllmClient(url, serve, self._key)
        self.name = f"vLLM server {self.client.url}"
        self.span_processes = [self.client.url]
        self.process: LaunchedProcess | None = None

    async def start(self) -> None:
        """Launch the server, unless serve.urls is set, wait until it is healthy, and send its first request, which is slow.

        Raises:
            ServiceStartError: it did not become healthy in time, ended, or failed the request.
            ConfigError: it refuses rollout.sampling.
        """
        serve = self._config.serve
        if self.is_ours:
            self.process = LaunchedProcess.start(
                self.name,
                vllm_launch.vllm_command(
                    serve,
                    str(self._model),
                    self._port,
                    head_dtype=self._config.train.head_dtype,
                    returns_routing=self._keeps_routing,
                    chat_template=self._config.rollout.chat_template,
                    chat_template_kwargs=self._config.rollout.chat_template_kwargs,
                ),
                log=self._logs / f"vllm-{self._number}.log",
                env={
                    **vllm_launch.vllm_environment(serve, api_key=self._key, gpus=self._gpus),
                    **self._variables,
                },
            )
        await self.client.wait_until_healthy(self._config.start_timeout_s, self.process)
        await self._warm_up(self.process)

    async def wait_for_failure(self, alarm: asyncio.Event) -> str:
        """Wait until the server fails or the alarm is set; returns the reason, "" after an alarm."""

        async def wait_while_healthy() -> None:
            while await self.client.is_healthy():  # noqa: ASYNC110 - a failing server notifies nobody
                await asyncio.sleep(HEALTH_INTERVAL_S)

        health = asyncio.ensure_future(wait_while_healthy())
        alarmed = asyncio.ensure_future(alarm.wait())
        end = asyncio.ensure_future(self.process.wait()) if self.process else None
        waits = {health, alarmed} | ({end} if end else set())
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.process is not None and not self.process.is_running:
            return f"its process ended with status {self.process.returncode}"
        return "it no longer answers /health" if health.done() else ""

    async def wait_for_return(self, *, must_sample: bool) -> None:
        """Wait until an attached server answers again; one that was restarted is sent a warm-up request.

        Args:
            must_sample: True if it answered /health all the time and failed generations.
        """
        client = self.client
        while not (await client.is_healthy() and (not must_sample or await client.can_sample())):  # noqa: ASYNC110 - no event
            await asyncio.sleep(HEALTH_INTERVAL_S)
        # A server that still has a version's name did not restart, so it has answered requests before.
        if not PolicyVersion.is_one(await self.client.version()):
            await self._warm_up()

    async def _warm_up(self, process: LaunchedProcess | None = None) -> None:
        # Environments may differ in their sampling; a second check of the same takes two short requests.
        configs = environment_configs(self._config).values()
        for sampling in {
            each.rollout.sampling.model_dump_json(): each.rollout.sampling for each in configs
        }.values():
            await self.client.warm_up(
                self._config.start_timeout_s,
                process,
                needs_routing=self._keeps_routing,
                further=sampling.parameters(),
            )


async def restart(
    service: TrainerService | ServerService, reason: str, restarts: int, max_restarts: int
) -> None:
    """Restart a launched service that failed, or wait for an attached trainer; recorded as the span `starting`.

    Raises:
        ServiceDiedError: it was restarted too often in a row, or the attached trainer did not return.
    """
    tail = ""
    if service.process is not None:
        tail = service.process.log_tail()
        await service.process.stop()
    # An attached trainer may return once, also where nothing is to be restarted.
    if restarts >= (max_restarts if service.process is not None else max(1, max_restarts)):
        raise ServiceDiedError(
            service.name, f"{reason}, after {restarts} restarts in a row (max_restarts)", tail
        )
    with ExitStack() as spans:
        # A process that has not started yet cannot record the seconds of its start.
        for process in service.span_processes:
            with within(process=process, lane="process"):
                spans.enter_context(span("starting", cause="restart"))
        if service.process is None and isinstance(service, TrainerService):
            await service.wait_for_return(reason)
        else:
            say(f"{service.name}: {reason.splitlines()[0]}; starting it again")
            await service.start()


@asynccontextmanager
async def open_services(
    config: RunConfig, model: Path, logs: Path, *, with_servers: bool, variables: Mapping[str, str] = {}
) -> AsyncIterator[tuple[TrainerService, tuple[ServerService, ...]]]:
    """Start the trainer and, if requested, the servers concurrently; launched ones are stopped when the block ends.

    Args:
        config: settings of the run.
        model: folder of the start model.
        logs: folder for logs.
        with_servers: False for the trainer alone.
        variables: added to the trainer's environment.
    """
    gpus = await asyncio.to_thread(assign_run_gpus, config, samples=with_servers, trains=True)
    if gpus.trainer:
        say(
            f"GPUs: {gpus.trainer} for the trainer; {' and '.join(filter(None, gpus.servers)) or 'none'} for vLLM"
        )
    trainer = TrainerService(config, logs, variables, gpus.trainer)
    servers = create_servers(config, model, logs, gpus) if with_servers else ()
    async with start_services((trainer, *servers)):
        yield trainer, servers


def create_servers(
    config: RunConfig, model: Path, logs: Path, gpus: GpuAssignment, variables: Mapping[str, str] = {}
) -> tuple[ServerService, ...]:
    """Create the vLLM servers of a run, attached or with GPUs to be launched on, without starting them.

    `variables` are added to the environment of launched ones.
    """
    if config.serve.urls:
        return tuple(ServerService(config, model, logs, number) for number in range(len(config.serve.urls)))
    return tuple(
        ServerService(config, model, logs, number, seen, variables)
        for number, seen in enumerate(gpus.servers)
    )


@asynccontextmanager
async def start_services(every: Sequence[TrainerService | ServerService]) -> AsyncIterator[None]:
    """Start services concurrently; launched ones are stopped when the block ends, also after an error."""
    try:
        with span("starting", cause="services"):
            async with asyncio.TaskGroup() as starting:
                for service in every:
                    starting.create_task(service.start())
        yield
    finally:
        with span("stopping", cause="services"):
            # Clients first: a request that is under way ends at once instead of with its server.
            await asyncio.gather(*(service.client.close() for service in every))
            await asyncio.gather(*(service.process.stop() for service in every if service.process))
