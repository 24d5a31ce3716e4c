"""Programs of tasks/train that run to their end in a separate process, since they import torch."""

import asyncio
import json
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from rollmill.tasks.errors import TrainError
from rollmill.tasks.processes.launched_process import LaunchedProcess
from rollmill.tasks.processes.python_child import child_environment, python_command

POLL_INTERVAL_S = 0.5


async def run_trainer_program(
    name: str,
    module: str,
    settings: Mapping[str, object],
    *,
    log: Path,
    timeout_s: float,
    timeout_setting: str,
    on_step: Callable[[int], object] | None = None,
) -> None:
    """Run `python -m MODULE SETTINGS.json` until it ends.

    Args:
        name: what errors call the program.
        module: of the program.
        settings: what the program reads.
        log: file that its output is appended to.
        timeout_s: seconds that it may take.
        timeout_setting: the setting that bounds them.
        on_step: called with the number of finished steps, whenever the program has printed more "step N of M" lines.

    Raises:
        TrainError: the program failed or took too long; has the last lines of its log.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "settings.json"
        file.write_text(json.dumps(settings))
        process = LaunchedProcess.start(
            name,
            python_command(module, str(file)),
            log=log,
            env={**child_environment(), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
        )
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                following = group.create_task(_follow_steps(process, on_step)) if on_step else None
                status = await process.wait()
                if following:
                    following.cancel()
        except TimeoutError:
            raise TrainError(f"{name}: not done within {timeout_setting} = {timeout_s:g} s") from None
        finally:
            await process.stop()
        if on_step:
            on_step(_count_steps(process))
        if status:
            raise TrainError(f"{name} ended with status {status}:\n{process.log_tail()}")


async def _follow_steps(process: LaunchedProcess, on_step: Callable[[int], object]) -> None:
    while True:
        await asyncio.sleep(POLL_INTERVAL_S)
        on_step(_count_steps(process))


def _count_steps(process: LaunchedProcess) -> int:
    """Return the number of finished steps: 100 if the last such line of the log is "step 99 of 900: loss 0.5"; 0 without one."""
    steps = re.findall(r"^step (\d+) of", process.log_tail(), re.MULTILINE)
    return int(steps[-1]) + 1 if steps else 0
