"""What the commands `run` and `collect` do, here or by a worker."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from flows.checks.preflight import preflight
from flows.config import RunConfig
from flows.deploying.prefect_api import lead_to_prefect
from flows.running.folder import check_movable, check_resumable, is_finished, move_aside, run_folder
from tasks.observe.run_line import command
from tasks.observe.spans import span


def run_here(config: RunConfig, name: str, *, again: bool, redo_failed: bool = False) -> None:
    """Run post-train in this process, against the Prefect server of PREFECT_API_URL or a local one.

    Args:
        config: all settings.
        name: folder of the run below `store.root`.
        again: move a finished run of that name to NAME-N, and start anew.
        redo_failed: sample what failed of the steps without a batch again.

    Raises:
        ConfigError: something is missing; nothing has been started.
        RunFinishedError, RunMismatchError: the folder's run cannot be gone on with like this.
    """
    preflight(config)

    def begun() -> Coroutine[Any, Any, str]:
        from flows.post_train import post_train

        return post_train(name, config, redo_failed)

    train_here(config, name, begun, again=again)


def collect_here(config: RunConfig, name: str, *, again: bool, redo_failed: bool = False) -> None:
    """Run the flow collect in this process; arguments and errors as for `run_here`."""
    preflight(config, trains=False)

    def begun() -> Coroutine[Any, Any, object]:
        from flows.collect import collect

        return collect(name, config, redo_failed)

    train_here(config, name, begun, again=again, trains=False)


def train_here(
    config: RunConfig,
    name: str,
    begun: Callable[[], Coroutine[Any, Any, object]],
    *,
    again: bool,
    trains: bool = True,
) -> None:
    """Run a flow that makes a run of that name, or goes on with it, as the last thing of this process.

    Args:
        config: all settings.
        name: folder of the run below `store.root`.
        begun: imports the flow, which is left to when Prefect's settings are known, and calls it.
        again: move a finished run of that name to NAME-N, and start anew.
        trains: False for the flow collect.
    """
    folder = run_folder(name, config)
    starts_anew = again and is_finished(folder)
    with command():
        with span("checking"):
            if starts_anew:
                check_movable(folder)
            else:
                check_resumable(folder, config, trains=trains)
        with span("starting", cause="Prefect"):
            lead_to_prefect()
        if starts_anew:
            move_aside(folder)
        from flows.commands.ending import flow_command

        with flow_command(lambda: is_finished(folder), config.observe.exit_timeout_s):
            asyncio.run(begun())


def run_deployed(
    config: RunConfig, name: str, deployment: str, *, again: bool, redo_failed: bool = False
) -> None:
    """Have a worker run post-train; as for `run_here`, but what a run needs is looked for where it runs.

    Args:
        config: all settings.
        name: folder of the run below `store.root`.
        deployment: name of the deployment, after the slash.
        again: move a finished run of that name to NAME-N, and start anew.
        redo_failed: sample what failed of the steps without a batch again.

    Raises:
        ConfigError: there is no Prefect server, or no such deployment.
    """
    run_folder(name, config)
    lead_to_prefect()
    from flows.deploying.triggering import Order, trigger

    trigger(Order(deployment, name, config, again=again, redo_failed=redo_failed))
