"""The flows as deployments of a Prefect server: what prefect.yaml fills in, and how it is put there."""

import asyncio
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
import yaml

from flows.config import RescoreConfig
from flows.presets import PRESETS
from flows.settings import load
from tasks.errors import ConfigError, ServiceError

FILE = Path("prefect.yaml")
RENDERED = Path(".rollmill/prefect.yaml")
LAST_LINES = 40
ENGINE = shlex.join([sys.executable, "-m", "prefect.engine"])
"""Of a process pool's runs. Where it is given, Prefect's worker starts it at once, and calls the flow's hooks itself; without it,
a process that looks for the flow's folder comes before each run, and another one calls the hooks of a cancelled one."""


def preset(name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A preset as deployments have it: a build step of prefect.yaml.

    Returns:
        `config`: the flow's parameter, all settings resolved; `folder`: where relative paths begin; `engine`: the command
        that runs a flow in this environment.
    """
    config = load(name, tuple(overrides)).model_dump(mode="json")
    return {"config": config, "folder": str(Path.cwd()), "engine": ENGINE}


def rescore_preset(name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A preset's part in scoring stored rollouts anew; as `preset`, for the flow rescore."""
    whole = preset(name, overrides)
    sections = {each: whole["config"][each] for each in ("score", "store", "observe")}
    return whole | {"config": RescoreConfig.model_validate(sections).model_dump(mode="json")}


def deploy_all(pool: str, overrides: Sequence[str] = ()) -> None:
    """Make the work pool unless it is there, deploy all of prefect.yaml, put the automations, and say what comes next.

    Args:
        pool: process, docker or kubernetes: a name of definitions.pools in prefect.yaml.
        overrides: key=value, for every deployment that has these settings.

    Raises:
        ConfigError, ServiceStartError: this is no checkout, or there is no Prefect server.
        ServiceError: Prefect refused.
    """
    document = rendered(_document(), pool, overrides)
    from flows.deploying.prefect_api import lead_to_prefect

    lead_to_prefect()
    from flows.deploying import automations, work_pools

    place = document["definitions"]["pools"][pool]
    asyncio.run(work_pools.ensure_pool(place["name"], pool))
    RENDERED.parent.mkdir(exist_ok=True)
    RENDERED.write_text(yaml.safe_dump(document, sort_keys=False))
    _prefect("deploy", "--all", "--prefect-file", str(RENDERED))
    asyncio.run(automations.put_automations(automations.shipped()))
    names = [f"{_flow_of(each)}/{each['name']}" for each in document["deployments"]]
    for line in asyncio.run(work_pools.deployed(names, place["name"])):
        typer.echo(line)


def rendered(document: dict[str, Any], pool: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """prefect.yaml with all deployments in a pool of that kind, and with more settings.

    Raises:
        ConfigError: there is no such pool.
    """
    pools = document["definitions"]["pools"]
    if pool not in pools:
        raise ConfigError("--pool", pool, f"{FILE} has {', '.join(pools)}")
    place = pools[pool]
    deployments = [_placed(each, place, overrides) for each in document["deployments"]]
    return document | {"deployments": deployments}


def _placed(deployment: dict[str, Any], place: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A deployment in a work pool, its queue kept."""
    steps = [
        {name: _step(name, arguments, place, overrides) for name, arguments in step.items()}
        for step in deployment["build"]
    ]
    work_pool = dict(place) | {"work_queue_name": deployment["work_pool"]["work_queue_name"]}
    return deployment | {"build": steps, "work_pool": work_pool}


def _step(
    name: str, arguments: Mapping[str, Any], place: Mapping[str, Any], overrides: Sequence[str]
) -> dict[str, Any]:
    if "pool" in arguments:
        return {**arguments, "pool": place["name"]}
    return {**arguments, "overrides": [*arguments.get("overrides", ()), *overrides]}


def _document() -> dict[str, Any]:
    """What prefect.yaml says."""
    for needed in (FILE, PRESETS):
        if not needed.exists():
            remedy = f"{needed} is not in this folder; run it in a checkout of Rollmill, or in a copy of {FILE} and {PRESETS}/"
            raise ConfigError("folder", str(Path.cwd()), remedy)
    try:
        document: dict[str, Any] = yaml.safe_load(FILE.read_text())
    except yaml.YAMLError as error:
        raise ConfigError("prefect.yaml", str(FILE.absolute()), f"it is not YAML: {error}") from error
    return document


def _flow_of(deployment: Mapping[str, Any]) -> str:
    """The name of the flow that an entrypoint leads to."""
    from prefect.flows import load_flow_from_entrypoint

    return load_flow_from_entrypoint(deployment["entrypoint"]).name


def _prefect(*words: str) -> None:
    """Run a command of Prefect's; ServiceError with the end of its output when it fails."""
    environment = os.environ | {"PREFECT_CLI_PROMPT": "false", "PREFECT_CLI_COLORS": "false"}
    command = [sys.executable, "-m", "prefect", *words]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-LAST_LINES:])
        raise ServiceError("Prefect", f"`prefect {' '.join(words)}` failed", tail)
