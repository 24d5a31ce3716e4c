"""What the commands `run`, `trainer` and `vllm` do."""

import asyncio
import os
import secrets
import signal
import subprocess
from pathlib import Path

from flows.config import RunConfig
from tasks.errors import RunFinishedError
from tasks.serve.process import free_port
from tasks.store.layout import RunFolder
from tasks.store.manifest import has_manifest, read_manifest

QUIET_TERMINAL = {"PREFECT_LOGGING_LEVEL": "WARNING", "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL"}
"""The UI keeps the flow's log; the terminal shows the progress bar, and an error once."""


def run_here(config: RunConfig, name: str, *, again: bool) -> None:
    """Run post-train in this process, against the Prefect server of PREFECT_API_URL or a local one.

    Args:
        again: move a finished run of that name to NAME-N, and start anew.

    Raises:
        ConfigError: something is missing; nothing has been started.
        RunFinishedError: the run is finished, and `again` is False.
    """
    from flows.preflight import preflight

    preflight(config)
    folder = Path(config.store.root) / name
    _settle_finished(folder, config.steps, again=again)
    for key, value in QUIET_TERMINAL.items():
        os.environ.setdefault(key, value)
    from flows import server

    os.environ["PREFECT_API_URL"] = server.ensure()
    from flows.post_train import post_train
    from flows.summary import print_summary

    asyncio.run(_until_signalled(post_train(name, config)))
    print_summary(RunFolder(folder), run_url)


async def _until_signalled(work: "Coroutine[object, object, str]") -> str:
    """Await `work`; SIGTERM cancels it as Ctrl-C does, so that what it opened is closed."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _settle_finished(folder: Path, steps: int, *, again: bool) -> None:
    run_folder = RunFolder(folder)
    if not has_manifest(run_folder):
        return
    manifest = read_manifest(run_folder)
    if manifest.status != "finished":
        return
    if again:
        folder.rename(_free_name(folder))
    elif manifest.config["steps"] >= steps:
        raise RunFinishedError(
            f"{folder} has finished its {steps} steps; add --again to move it aside and start anew, or raise steps"
        )


def _free_name(folder: Path) -> Path:
    n = 1
    while (moved := folder.with_name(f"{folder.name}-{n}")).exists():
        n += 1
    return moved
