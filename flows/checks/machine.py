"""What a flow checks of the machine that a worker has started it on; `rollmill` has checked it before."""

import asyncio
from functools import partial

from prefect.runtime import deployment

from flows.checks.preflight import preflight
from flows.config import RunConfig


async def check_machine(config: RunConfig, *, samples: bool = True, trains: bool = True) -> None:
    """Check what a configuration needs before anything is started, in a flow run of a deployment.

    Raises:
        ConfigError: the first thing that is missing, as `rollmill run` would say it.
    """
    if deployment.id:
        await asyncio.to_thread(partial(preflight, config, samples=samples, trains=trains))
