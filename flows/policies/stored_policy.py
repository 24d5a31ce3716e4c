"""A stored version of a run's policy: as a model folder, and on vLLM servers that are started with it."""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from flows.config import RunConfig
from flows.failure import one_error
from flows.policies.exporting import MODULE, export_settings
from flows.policies.services import ServerService
from flows.running.run import Run
from flows.running.submission import together
from flows.ui.progress import say
from tasks.errors import ServiceDiedError, TrainError
from tasks.serve.process import LaunchedProcess
from tasks.serve.version import PolicyVersion
from tasks.store.checkpoints import copy_checkpoint
from tasks.store.layout import RunFolder, checkpoint_key

LOGS = "evaluate"
"""Folder of the servers' logs, and of the export's, in the run's logs/."""


@asynccontextmanager
async def model_of(run: Run, version: int) -> AsyncIterator[Path]:
    """A version as a Hugging Face folder, which is removed afterwards; version 0 is the start model's own folder."""
    if not version:
        yield run.model
        return
    folder = run.folder
    with tempfile.TemporaryDirectory(dir=_scratch(folder)) as place:
        say(f"writing version {version} as a model")
        output, settings, copy = (Path(place) / name for name in ("model", "export.json", "checkpoint"))
        copy.mkdir()
        source = folder.path(checkpoint_key(version))
        checkpoint = await asyncio.to_thread(copy_checkpoint, source, copy)
        told = export_settings(run.config, run.model, run.id, version, checkpoint, output)
        settings.write_text(json.dumps(told))
        await _export(settings, folder.logs / LOGS / "export.log", run.config)
        yield output


def _scratch(folder: RunFolder) -> Path:
    """A local folder that holds a model: beside the run's unfinished files."""
    place = folder.tmp
    place.mkdir(parents=True, exist_ok=True)
    return place


async def _export(settings: Path, log: Path, config: RunConfig) -> None:
    process = LaunchedProcess.start(
        "export",
        [sys.executable, "-m", MODULE, str(settings)],
        log=log,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stop_grace_s=config.serve.stop_grace_s,
    )
    try:
        async with asyncio.timeout(config.train.step_timeout_s):
            status = await process.ended()
    except TimeoutError:
        remedy = f"not done within train.step_timeout_s = {config.train.step_timeout_s:g} s"
        raise TrainError(f"export of a checkpoint: {remedy}") from None
    finally:
        await process.stop()
    if status:
        raise TrainError(f"export of a checkpoint ended with status {status}:\n{process.log_tail()}")


@asynccontextmanager
async def serving(run: Run, model: Path, version: int) -> AsyncIterator[None]:
    """Start the run's servers with a model, and let them be asked as that version; they end afterwards.

    Raises:
        ServiceStartError: one did not become healthy.
        ServiceDiedError: one failed meanwhile.
    """
    logs = run.folder.logs / LOGS
    servers = [ServerService(run.config, model, logs, number) for number in range(run.config.serve.servers)]
    name = PolicyVersion(run.id, run.store.manifest.incarnation, version)
    say(f"bringing up vLLM with version {version}")
    try:
        with one_error():
            async with asyncio.TaskGroup() as starting:
                for server in servers:
                    starting.create_task(server.start())
            await together([partial(server.client.set_version, str(name)) for server in servers])
            for server in servers:
                run.pool.admit(server.client)
            async with asyncio.TaskGroup() as watching:
                watches = [watching.create_task(_watch(run, server)) for server in servers]
                yield
                for watch in watches:
                    watch.cancel()
    finally:
        await asyncio.gather(*(server.client.close() for server in servers))
        await asyncio.gather(*(server.process.stop() for server in servers if server.process))


async def _watch(run: Run, server: ServerService) -> None:
    """Let a server in again that failed a request and can sample; ServiceDiedError when it cannot."""
    alarm = run.pool.alarm(server.client)
    while True:
        reason = await server.failed(alarm)
        alarm.clear()
        if not reason and not await server.client.can_sample():
            reason = "it answers /health and fails generations"
        if reason:
            run.pool.set_aside(server.client)
            tail = server.process.log_tail() if server.process else ""
            raise ServiceDiedError(server.name, reason, tail)
        run.pool.answered(server.client)
        run.pool.admit(server.client)
