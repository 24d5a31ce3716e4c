"""What the commands `run`, `trainer` and `vllm` do."""

import asyncio
import os
import secrets
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import typer

from flows import server
from flows.config import RunConfig
from flows.folder import check_movable, check_resumable, is_finished, move_aside, run_folder
from flows.preflight import check_trainer, check_vllm, preflight
from flows.recipe import start_model_folder
from tasks.errors import ConfigError
from tasks.serve import vllm
from tasks.serve.process import LaunchedProcess, free_port
from tasks.store.layout import RunFolder
from tasks.train import launch
from tasks.train.launch import Nodes

QUIET_TERMINAL = {
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL": "INFO",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "DO_NOT_TRACK": "1",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
}
"""The UI keeps the flow's log; the terminal shows the progress bar, and an error once."""

SHORT_RETRIES = {"PREFECT_CLIENT_MAX_RETRIES": "2"}
"""A request to a Prefect server that is gone gives up after about 6 s, and not after a minute."""


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
    if starts_anew:
        check_movable(folder)
    else:
        check_resumable(folder, config, trains=trains)
    lead_to_prefect()
    if starts_anew:
        move_aside(folder)
    from flows.ending import flow_command

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
    from flows.triggering import Order, trigger

    trigger(Order(deployment, name, config, again=again, redo_failed=redo_failed))


def lead_to_prefect(*, says_on_stderr: bool = False) -> None:
    """Find or start the Prefect server that flows of this process talk to; Prefect is imported only afterwards.

    Where its UI is, is said on standard output, unless that is for a program to read.

    Raises:
        ConfigError, ServiceStartError: there is none, and none can be started.
    """
    os.environ |= {k: v for k, v in (QUIET_TERMINAL | SHORT_RETRIES).items() if k not in os.environ}
    os.environ["PREFECT_API_URL"] = server.ensure()
    ui_url = os.environ["PREFECT_API_URL"].removesuffix("/api")
    typer.echo(f"Prefect UI: {ui_url}", err=says_on_stderr)


def trainer_here(config: RunConfig, nodes: Nodes, host: str) -> None:
    """Run a trainer, or one node's part of it, in the foreground; node 0 prints what a flow needs to attach to it.

    Args:
        config: all settings.
        nodes: the machines that it runs on.
        host: address of this machine that the control API listens on.

    Raises:
        ConfigError: something that it needs is missing; nothing has been started.
    """
    nodes.check(config.train.ranks)
    check_trainer(config)
    token = os.environ.get(config.train.token_env) or secrets.token_urlsafe(24)
    port = config.train.port or free_port()
    logs = RunFolder(f"{config.store.root}/trainer").local / (
        f"node-{nodes.number}" if nodes.count > 1 else ""
    )
    if nodes.number == 0:
        typer.echo(f"train.url=http://{host}:{port}\n{config.train.token_env}={token}")
    file = launch.write_config(config.train, config.sync, port, logs, host)
    _foreground(
        launch.command(config.train, file, nodes),
        launch.environment(config.train, token),
        config.serve.stop_grace_s,
    )


def vllm_here(config: RunConfig) -> None:
    """Run a vLLM server in the foreground; prints what a flow needs to attach to it.

    Raises:
        ConfigError: the model, or something else that it needs, is missing; nothing has been started.
    """
    check_vllm(config)
    model = start_model_folder(config)
    if not (model / "config.json").is_file():
        raise ConfigError(
            "model", str(model), "there is no model there yet; `rollmill run` makes a start model"
        )
    port = config.serve.port or free_port()
    typer.echo(f"serve.urls=[http://{vllm.LOOPBACK}:{port}]")
    _foreground(
        vllm.command(config.serve, str(model), port, returns_routing=config.rollout.keep_routing),
        vllm.environment(config.serve),
        config.serve.stop_grace_s,
    )


def _foreground(command: Sequence[str], environment: dict[str, str], grace_s: float) -> None:
    """Run a service in this terminal until it ends; it ends with all below it when this process does."""
    service = LaunchedProcess.start(command[0], command, log=None, env=environment, stop_grace_s=grace_s)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        raise SystemExit(asyncio.run(service.ended()))
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        service.stop_now()
