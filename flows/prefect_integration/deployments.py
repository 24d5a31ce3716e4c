"""The flows as deployments of a Prefect server: the build steps of prefect.yaml, and `rollmill deploy`."""

import asyncio
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
import yaml

from rollmill.flows.configuration.config import AnnotateConfig, RescoreConfig
from rollmill.flows.configuration.forms import FORMS
from rollmill.flows.configuration.presets import PRESETS
from rollmill.flows.configuration.settings import load
from rollmill.tasks.config import StageConfig
from rollmill.tasks.errors import ConfigError, ServiceError
from rollmill.tasks.processes.python_child import child_environment, python_command

FILE = Path("prefect.yaml")
RENDERED = Path(".rollmill/prefect.yaml")
LAST_LINES = 40
# Command of the runs of a process pool. With it, the worker starts the run directly and calls the flow's hooks itself; without it,
# the worker starts another process before each run, and one more to call the hooks of a cancelled run.
ENGINE = shlex.join(python_command("prefect.engine"))


def preset(name: str, overrides: Sequence[str] = (), flow: str = "post-train") -> dict[str, Any]:
    """Return the parameters of a deployment that runs a preset; a build step of prefect.yaml.

    Args:
        name: of the preset.
        overrides: key=value.
        flow: whose form has the settings: post-train, collect, evaluate, retrain, rescore or annotate.

    Returns:
        `config`: the preset's settings, as the flow's form has them; `folder`: the working folder; `engine`: the command
        that runs a flow in this environment.
    """
    loaded = load(name, tuple(overrides))
    config: StageConfig = loaded
    # The sections as they are, which know what was set and what this machine chose.
    if flow == "rescore":
        config = RescoreConfig(score=loaded.score, store=loaded.store, observe=loaded.observe)
    if flow == "annotate":
        config = AnnotateConfig(serve=loaded.serve, store=loaded.store)
    return {"config": FORMS[flow].values(config), "folder": str(Path.cwd()), "engine": ENGINE}


def deploy_all(pool: str, overrides: Sequence[str] = ()) -> None:
    """Create the work pool if it is missing, the deployments of prefect.yaml and the automations; prints their pages.

    Args:
        pool: process, docker or kubernetes: a name of definitions.pools in prefect.yaml.
        overrides: key=value, for all deployments.

    Raises:
        ConfigError, ServiceStartError: prefect.yaml or conf/ is missing, or there is no Prefect server.
        ServiceError: Prefect refused a deployment.
    """
    document = render_deployments(_read_document(), pool, overrides)
    from rollmill.flows.prefect_integration.prefect_api import connect_to_prefect

    # Prefect reads its address when it is imported.
    connect_to_prefect()
    from rollmill.flows.prefect_integration import work_pools

    place = document["definitions"]["pools"][pool]
    asyncio.run(work_pools.ensure_pool(place["name"], pool))
    # `prefect deploy` reads a file: the one of the repository, with this pool and these overrides.
    RENDERED.parent.mkdir(exist_ok=True)
    RENDERED.write_text(yaml.safe_dump(document, sort_keys=False))
    _prefect("deploy", "--all", "--prefect-file", str(RENDERED))
    asyncio.run(work_pools.put_shipped_automations())
    names = [f"{_flow_name(each)}/{each['name']}" for each in document["deployments"]]
    for line in asyncio.run(work_pools.describe_deployments(names, place["name"])):
        typer.echo(line)


def render_deployments(document: dict[str, Any], pool: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the contents of prefect.yaml with every deployment moved to one work pool, and with overrides in its build steps.

    Args:
        document: the contents of prefect.yaml; not changed.
        pool: process, docker or kubernetes: a name of definitions.pools. Deployments keep their work queues; build steps that
            name a pool name this one.
        overrides: key=value, appended to the overrides of Rollmill's other build steps.

    Raises:
        ConfigError: definitions.pools has no such name.
    """
    pools = document["definitions"]["pools"]
    if pool not in pools:
        raise ConfigError("--pool", pool, f"{FILE} has {', '.join(pools)}")
    place = pools[pool]
    deployments = [_place_deployment(each, place, overrides) for each in document["deployments"]]
    return document | {"deployments": deployments}


def _place_deployment(
    deployment: dict[str, Any], place: Mapping[str, Any], overrides: Sequence[str]
) -> dict[str, Any]:
    """Return a deployment in the work pool `place`, with the overrides in its build steps; its work queue stays the same."""
    steps = [
        {name: _step(name, arguments, place, overrides) for name, arguments in step.items()}
        for step in deployment.get("build") or ()
    ]
    own = deployment.get("work_pool") or {}
    work_pool = dict(place) | {name: own[name] for name in ("work_queue_name",) if name in own}
    return deployment | {"build": steps, "work_pool": work_pool}


def _step(name: str, arguments: Any, place: Mapping[str, Any], overrides: Sequence[str]) -> Any:
    """Return the arguments of a build step in the work pool `place`, with the overrides; steps that are not Rollmill's stay as they are."""
    if not name.startswith("rollmill."):
        return arguments
    if "pool" in arguments:
        return {**arguments, "pool": place["name"]}
    return {**arguments, "overrides": [*arguments.get("overrides", ()), *overrides]}


def _read_document() -> dict[str, Any]:
    """Read prefect.yaml of the working folder; ConfigError if it or the folder of presets is missing, or it is not YAML."""
    for needed in (FILE, PRESETS):
        if not needed.exists():
            remedy = (
                f"{needed} is missing in this folder; run the command in a checkout of Rollmill, in a project that "
                f"`rollmill init` wrote, or next to copies of {FILE} and {PRESETS}/"
            )
            raise ConfigError("folder", str(Path.cwd()), remedy)
    try:
        document: Any = yaml.safe_load(FILE.read_text())
    except yaml.YAMLError as error:
        raise ConfigError("prefect.yaml", str(FILE.absolute()), f"it is not YAML: {error}") from error
    if not _is_shipped(document):
        remedy = (
            "it lacks definitions.pools or the list deployments: add them, as in the file that `rollmill init` writes, or deploy it "
            "with `prefect deploy`"
        )
        raise ConfigError("prefect.yaml", str(FILE.absolute()), remedy)
    shipped: dict[str, Any] = document
    return shipped


def _is_shipped(document: object) -> bool:
    """Return True if a prefect.yaml has work pools and deployments in the form of that of Rollmill."""
    definitions = document.get("definitions") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not isinstance(definitions, dict):
        return False
    return isinstance(definitions.get("pools"), dict) and isinstance(document.get("deployments"), list)


def _flow_name(deployment: Mapping[str, Any]) -> str:
    """Return the name of the flow at a deployment's entrypoint."""
    from prefect.flows import load_flow_from_entrypoint

    return load_flow_from_entrypoint(deployment["entrypoint"]).name


def _prefect(*words: str) -> None:
    """Run the command `prefect` with these arguments; ServiceError with the end of its output if it fails."""
    # A prompt would wait for an answer that never comes.
    environment = child_environment() | {"PREFECT_CLI_PROMPT": "false", "PREFECT_CLI_COLORS": "false"}
    command = python_command("prefect", *words)
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-LAST_LINES:])
        reason = f"`prefect {' '.join(words)}` failed; if its server was too busy (status 503), run the command again"
        raise ServiceError("Prefect", reason, tail)
