"""From a name and arguments to an environment of the `verifiers` library, or to an error that says what to do.

The library is imported here when a function is called, not before: it takes seconds.
"""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tasks.errors import ConfigError
from tasks.rollout.environment import Split

PREFIX = "verifiers:"
FIELD, ARGUMENTS_FIELD = "rollout.environment", "rollout.environment_args"
SELECT, HELD_OUT = "select", "held_out"
HELD_OUT_MODULUS = 5
INSTALL = "pip install 'rollmill[verifiers]'"
_NOT_INSTALLED = (
    "install the environment's package where the flows run: pip install, or prime env install OWNER/NAME"
)


def check_installed(name: str, arguments: str) -> None:
    """Check what can be checked without importing the library or the environment.

    Raises:
        ConfigError: the library or the environment's package is not installed, or the arguments are no JSON object.
    """
    arguments_of(arguments)
    library = find_spec("verifiers")
    if library is None or not library.submodule_search_locations:
        raise ConfigError(FIELD, name, f"the verifiers library is not installed: {INSTALL}")
    module = _module(name.removeprefix(PREFIX))
    task_sets = Path(library.submodule_search_locations[0], "v1", "tasksets")
    if not (task_sets / module).exists() and find_spec(module) is None:
        raise ConfigError(FIELD, name, _NOT_INSTALLED)


def arguments_of(text: str) -> Mapping[str, Any]:
    """The environment's arguments from their JSON.

    Raises:
        ConfigError: the text is no JSON object.
    """
    try:
        arguments = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError(ARGUMENTS_FIELD, text, f"give a JSON object ({error})") from error
    if not isinstance(arguments, dict):
        raise ConfigError(
            ARGUMENTS_FIELD, text, 'give a JSON object, such as {"taskset": {"split": "train"}}'
        )
    return arguments


def environments_of(name: str, arguments: Mapping[str, Any]) -> Mapping[Split, Any]:
    """The environment for each split: another one for held-out problems when the arguments have `held_out`.

    Example: {"taskset": {"split": "train"}, "held_out": {"split": "test"}} makes two; {} makes one for both.

    Raises:
        ConfigError: library or environment is not installed, or an argument is wrong.
    """
    settings = {key: value for key, value in arguments.items() if key not in (SELECT, HELD_OUT)}
    task_set = {**settings.get("taskset", {}), "id": name}
    train = _environment(name, {**settings, "taskset": task_set})
    if HELD_OUT not in arguments:
        return {"train": train, "held_out": train}
    held_out = _environment(name, {**settings, "taskset": {**task_set, **arguments[HELD_OUT]}})
    return {"train": train, "held_out": held_out}


def tasks_of(
    environments: Mapping[Split, Any], arguments: Mapping[str, Any]
) -> Mapping[Split, Sequence[Any]]:
    """The problems of each split, in the order of the task set.

    One task set is shared out by the crc32 of each task's key: what 5 divides is held out.

    Raises:
        ConfigError: the task set has no end and `select` sets none, or a split is empty.
    """
    train = _selected(environments["train"], arguments)
    if environments["held_out"] is environments["train"]:
        keyed = [(zlib.crc32(task.key.encode()) % HELD_OUT_MODULUS == 0, task) for task in train]
        held_out = [task for is_held_out, task in keyed if is_held_out]
        train = [task for is_held_out, task in keyed if not is_held_out]
    else:
        held_out = _selected(environments["held_out"], arguments)
    if not train:
        raise ConfigError(ARGUMENTS_FIELD, dict(arguments), "the environment has no problems to train on")
    return {"train": train, "held_out": held_out}


def offers_tools(environment: Any) -> bool:
    """True when the environment's problems come with tools, or its program may bring some of its own."""
    from tasks.rollout.verifiers_harness import InProcessChat

    task_set = environment.taskset
    harnesses = environment._harnesses.values()
    return bool(
        task_set.toolsets(task_set.config)
        or task_set.task_type().toolsets(task_set.config.task)
        or any(not isinstance(each, InProcessChat) for each in harnesses)
    )


def versions_of(environment: Any) -> str:
    """What code a reward comes from.

    Example: "verifiers 0.4.0", or "verifiers 0.4.0, some-environment 1.2".
    """
    module = type(environment.taskset).__module__.partition(".")[0]
    packages = dict.fromkeys(["verifiers", *metadata.packages_distributions().get(module, [])])
    return ", ".join(f"{package} {metadata.version(package)}" for package in packages)


def _environment(name: str, settings: dict[str, Any]) -> Any:
    _keep_loopback_direct()
    try:
        from verifiers.v1.utils import loaders

        import_module("tasks.rollout.verifiers_harness")
    except ImportError as error:
        remedy = f"the library is not installed, or not in the version Rollmill takes: {INSTALL} ({error})"
        raise ConfigError(FIELD, f"{PREFIX}{name}", remedy) from error
    from pydantic import ValidationError

    try:
        return loaders.load_environment(_with_roles(loaders.resolve_env_config(settings)))
    except ValidationError as error:
        raise ConfigError(
            ARGUMENTS_FIELD, settings, f"the environment does not take this: {error}"
        ) from error
    except Exception as error:  # environments are foreign code
        raise ConfigError(FIELD, f"{PREFIX}{name}", _remedy(name, error)) from error


def _keep_loopback_direct() -> None:
    """Tell HTTP clients of this process and its children that no proxy leads to it: the library talks over loopback."""
    for variable in ("no_proxy", "NO_PROXY"):
        hosts = [host for host in os.environ.get(variable, "").split(",") if host]
        os.environ[variable] = ",".join(dict.fromkeys([*hosts, "127.0.0.1", "localhost"]))


def _module(name: str) -> str:
    """The module of an environment, as the library makes it from OWNER/NAME@VERSION."""
    return name.rsplit("/", 1)[-1].partition("@")[0].replace("-", "_").lower()


def _remedy(name: str, error: Exception) -> str:
    raised = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError):
        return f"{_NOT_INSTALLED} ({raised})"
    no_plugin = isinstance(error, AttributeError | TypeError)
    if no_plugin and hasattr(import_module(_module(name)), "load_environment"):
        return "the package is written for verifiers before 0.4: ask for a version of it that has a Taskset"
    return f"the environment cannot be made; {raised}"


def _with_roles(config: Any) -> Any:
    """The configuration with the policy's seats played in this process, where neither it nor the task set says how.

    The library's own defaults are a shell on the host, and a rented sandbox.
    """
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.runtimes import SubprocessConfig
    from verifiers.v1.utils.loaders import default_harness_id, harness_config_type

    from tasks.rollout.verifiers_harness import PLUGIN

    seats: dict[str, Any] = {}
    for seat, settings in agent_config_fields(config).items():
        changes: dict[str, Any] = {}
        if settings.harness is None and default_harness_id(config.taskset.id) != config.taskset.id:
            changes["harness"] = harness_config_type(PLUGIN)(id=PLUGIN)
            if "runtime" not in settings.model_fields_set:
                changes["runtime"] = SubprocessConfig()
        seats[seat] = settings.model_copy(update=changes)
    return config.model_copy(update=seats)


def _selected(environment: Any, arguments: Mapping[str, Any]) -> list[Any]:
    from pydantic import ValidationError
    from verifiers.v1 import SelectConfig

    try:
        chosen = environment.taskset.select(SelectConfig(**arguments.get(SELECT, {})))
    except (ValidationError, ValueError, TypeError) as error:
        raise ConfigError(ARGUMENTS_FIELD, dict(arguments), f"{SELECT}: {error}") from error
    if not chosen.bounded:
        remedy = (
            f'the environment makes problems without end: say how many, {{"{SELECT}": {{"limit": 2000}}}}'
        )
        raise ConfigError(ARGUMENTS_FIELD, dict(arguments), remedy)
    try:
        return list(chosen)
    except Exception as error:  # environments are foreign code
        remedy = f"its problems cannot be loaded; {type(error).__name__}: {error}"
        raise ConfigError(FIELD, f"{PREFIX}{environment.taskset.config.id}", remedy) from error
