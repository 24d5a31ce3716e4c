"""What the commands `trainer` and `vllm` do: a service in this terminal, for flows elsewhere to attach to."""

import asyncio
import os
import secrets
import signal
from collections.abc import Sequence

import typer

from flows.checks.preflight import check_trainer, check_vllm
from flows.config import RunConfig
from flows.recipe import start_model_folder
from tasks.errors import ConfigError
from tasks.serve import vllm
from tasks.serve.process import LaunchedProcess, free_port
from tasks.store.layout import RunFolder
from tasks.train import launch
from tasks.train.launch import Nodes


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
