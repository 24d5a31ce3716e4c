"""The commands `rollmill trainer` and `rollmill vllm`: a service in this terminal, for flows elsewhere to attach to."""

import asyncio
import os
import secrets
import signal
from collections.abc import Sequence

import typer

from rollmill.flows.checks.machine_needs import check_address, check_port, check_trainer, check_vllm
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.recipe import download_model, start_model_folder
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.processes.gpus import GpuAssignment, assign_gpus, list_visible_gpus
from rollmill.tasks.processes.launched_process import LaunchedProcess, free_port
from rollmill.tasks.processes.network_interface import GLOO_INTERFACE_ENV
from rollmill.tasks.serve import vllm_launch
from rollmill.tasks.serve.vllm_launch import check_guarded, gpus_per_server
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.train.service import launch
from rollmill.tasks.train.service.launch import TOKEN_ENV, Nodes


def trainer_here(config: RunConfig, nodes: Nodes, host: str, port: int) -> None:
    """Run a trainer, or one machine's ranks of it, until it ends; machine 0 prints the settings to attach with.

    Args:
        config: all settings.
        nodes: the machines that share the ranks.
        host: address of this machine that the control API listens on.
        port: its port; 0: any free one.

    Raises:
        ConfigError: something is missing; nothing was started.
    """
    nodes.check(config.train.ranks)
    check_trainer()
    if nodes.number == 0:
        # The other machines do not listen there.
        check_address("--host", host)
    check_port(port)
    given = os.environ.get(TOKEN_ENV)
    token = given or secrets.token_urlsafe(24)
    port = port or free_port()
    logs = RunFolder(f"{config.store.root}/trainer").local / (
        f"node-{nodes.number}" if nodes.count > 1 else ""
    )
    # Flows connect to machine 0 only.
    if nodes.number == 0:
        # Whoever has set the token knows it, and this output may be a pod's log.
        shown_token = "" if given else f"\n{TOKEN_ENV}={token}"
        typer.echo(f"train.url=http://{host}:{port}{shown_token}")
    file = launch.write_config(config.train, config.sync, port, logs, host)
    # Without names rank i uses the i-th GPU that this terminal sees.
    gpus = _pick_gpus(config.train.gpus, ranks=config.train.ranks // nodes.count).trainer
    environment = launch.build_environment(config.train, token, gpus=gpus)
    if nodes.count > 1 and GLOO_INTERFACE_ENV not in environment:
        environment[GLOO_INTERFACE_ENV] = nodes.find_interface()
    _run_service(launch.build_command(config.train, file, nodes), environment)


def vllm_here(config: RunConfig, host: str, port: int) -> None:
    """Run a vLLM server until it ends; prints the setting to attach with.

    Args:
        config: all settings.
        host: address of this machine that the server listens on.
        port: its port; 0: any free one.

    Raises:
        ConfigError: the model, or something else, is missing; nothing was started.
    """
    check_vllm(config)
    check_guarded(config.serve, host=host)
    check_address("--host", host)
    check_port(port)
    download_model("model", config.model)
    model = start_model_folder(config)
    if not (model / "config.json").is_file():
        raise ConfigError("model", str(model), "there is no model yet; `rollmill run` makes a start model")
    port = port or free_port()
    (gpus,) = _pick_gpus(config.serve.gpus, servers=1, per_server=gpus_per_server(config.serve)).servers
    typer.echo(f"serve.urls=[http://{host}:{port}]")
    _run_service(
        vllm_launch.vllm_command(
            config.serve,
            str(model),
            port,
            host=host,
            head_dtype=config.train.head_dtype,
            returns_routing=config.rollout.keep_routing,
            chat_template=config.rollout.chat_template,
            chat_template_kwargs=config.rollout.chat_template_kwargs,
        ),
        vllm_launch.vllm_environment(config.serve, gpus=gpus),
    )


def _pick_gpus(
    names: Sequence[str], *, ranks: int = 0, servers: int = 0, per_server: int = 1
) -> GpuAssignment:
    """Return the named GPUs for a trainer or a server, none if `names` is empty; ConfigError names one that is not visible."""
    visible = list_visible_gpus() if names else ()
    return assign_gpus(
        visible, ranks=ranks, servers=servers, per_server=per_server, train_gpus=names, serve_gpus=names
    )


def _run_service(command: Sequence[str], environment: dict[str, str]) -> None:
    """Run a service until it ends; its whole process tree ends with this process. Raises SystemExit with its status."""
    service = LaunchedProcess.start(command[0], command, log=None, env=environment)
    # SIGTERM must end the service too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        raise SystemExit(asyncio.run(service.wait()))
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        service.stop_now()
