"""Load an environment of the `verifiers` library from its name and arguments; errors name the setting and the remedy.

The library is imported inside functions, because the import takes seconds.
"""

import json
import os
from collections.abc import Mapping, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollmill.tasks.errors import ConfigError, LibraryError, SchemaError
from rollmill.tasks.rollout.environment import Split, is_held_out
from rollmill.tasks.store.environment_states import check_columns

PREFIX = "verifiers:"
FIELD = "rollout.environment"
ARGUMENTS_FIELD = f"{FIELD}.args"
SELECT, HELD_OUT = "select", "held_out"
INSTALL = "pip install 'rollmill[verifiers]'"
CHAT_PLUGIN = "rollmill_chat"
"""Name by which the library finds the harness `InProcessChat` (chat_harness.py)."""
_NOT_INSTALLED = (
    "install the environment's package where the flows run: pip install, or prime env install OWNER/NAME"
)


def check_installed(name: str) -> None:
    """Check that the `verifiers` library and an environment are installed, without importing either.

    Raises:
        ConfigError: the library or the environment's package is not installed.
    """
    library = find_spec("verifiers")
    if library is None or not library.submodule_search_locations:
        raise ConfigError(FIELD, name, f"the verifiers library is not installed: {INSTALL}")
    module = _module_name(name.removeprefix(PREFIX))
    # The library's own environments are modules of it, others are installed packages; importing either takes seconds.
    task_sets = Path(library.submodule_search_locations[0], "v1", "tasksets")
    if not (task_sets / module).exists() and find_spec(module) is None:
        raise ConfigError(FIELD, name, _NOT_INSTALLED)


def load_environments(name: str, arguments: Mapping[str, Any]) -> Mapping[Split, Any]:
    """Load the environment of each split; the held-out split has a separate one if `arguments` contains `held_out`.

    Example: {"taskset": {"split": "train"}, "held_out": {"split": "test"}} makes two; {} makes one for both.

    Raises:
        ConfigError: library or environment is not installed, or an argument is wrong.
    """
    settings = {key: value for key, value in arguments.items() if key not in (SELECT, HELD_OUT)}
    task_set = {**settings.get("taskset", {}), "id": name}
    train = _load_environment(name, {**settings, "taskset": task_set})
    if HELD_OUT not in arguments:
        return {"train": train, "held_out": train}
    held_out = _load_environment(name, {**settings, "taskset": {**task_set, **arguments[HELD_OUT]}})
    return {"train": train, "held_out": held_out}


def select_tasks(
    environments: Mapping[Split, Any], arguments: Mapping[str, Any]
) -> Mapping[Split, Sequence[Any]]:
    """Return the problems of each split, in the order of the task set.

    If both splits share a task set, a task is held out when 5 divides the crc32 of its key.

    Raises:
        ConfigError: the task set is endless and `select` sets no limit, or there are no problems to train on.
    """
    train = _select_split_tasks(environments["train"], arguments)
    if environments["held_out"] is environments["train"]:
        held_out = [task for task in train if is_held_out(task.key)]
        train = [task for task in train if not is_held_out(task.key)]
    else:
        held_out = _select_split_tasks(environments["held_out"], arguments)
    if not train:
        raise ConfigError(ARGUMENTS_FIELD, dict(arguments), "the environment has no problems to train on")
    return {"train": train, "held_out": held_out}


def offers_tools(environment: Any) -> bool:
    """Return True if the environment's problems come with tools, or its program may add tools."""
    task_set = environment.taskset
    harnesses = environment.config.agent_harnesses().values()
    return bool(
        task_set.toolsets(task_set.config)
        or task_set.task_type().toolsets(task_set.config.task)
        or any(each.id != CHAT_PLUGIN for each in harnesses)
    )


def library_versions(environment: Any) -> str:
    """Return the versions of `verifiers` and of the environment's package, whose code computes the rewards.

    Example: "verifiers 0.4.0", or "verifiers 0.4.0, some-environment 1.2".
    """
    module = type(environment.taskset).__module__.partition(".")[0]
    packages = dict.fromkeys(["verifiers", *metadata.packages_distributions().get(module, [])])
    return ", ".join(f"{package} {metadata.version(package)}" for package in packages)


def _load_environment(name: str, settings: dict[str, Any]) -> Any:
    # The library sends requests over loopback: no HTTP proxy may get them, in this process and its children.
    for variable in ("no_proxy", "NO_PROXY"):
        hosts = [host for host in os.environ.get(variable, "").split(",") if host]
        os.environ[variable] = ",".join(dict.fromkeys([*hosts, "127.0.0.1", "localhost"]))
    try:
        from verifiers.v1 import load_environment, resolve_env_config

        import_module("rollmill.tasks.rollout.environments.verifiers.chat_harness")
    except (ImportError, LibraryError) as error:
        remedy = (
            f"the library is not installed, or not in a version that Rollmill supports: {INSTALL} ({error})"
        )
        raise ConfigError(FIELD, f"{PREFIX}{name}", remedy) from error
    from pydantic import ValidationError

    try:
        return load_environment(_with_roles(resolve_env_config(settings)))
    except ValidationError as error:
        raise ConfigError(
            ARGUMENTS_FIELD, settings, f"the environment rejects these arguments: {error}"
        ) from error
    except Exception as error:
        # User code may raise anything.
        raise ConfigError(FIELD, f"{PREFIX}{name}", _loading_remedy(name, error)) from error


def _module_name(name: str) -> str:
    """Return the name of the Python module of an environment that the library calls OWNER/NAME@VERSION.

    Example: "owner/Word-Game@1.2" has the module "word_game".
    """
    return name.rsplit("/", 1)[-1].partition("@")[0].replace("-", "_").lower()


def _loading_remedy(name: str, error: Exception) -> str:
    raised = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError):
        return f"{_NOT_INSTALLED} ({raised})"
    no_plugin = isinstance(error, AttributeError | TypeError)
    if no_plugin and hasattr(import_module(_module_name(name)), "load_environment"):
        return "the package is written for verifiers before 0.4: install a version of it that has a Taskset"
    return f"the environment cannot be created; {raised}"


def _with_roles(config: Any) -> Any:
    """Return the environment's configuration with the harness `InProcessChat` for each agent that has no harness.

    An agent may have a harness from its settings or from the task set. `InProcessChat` runs in this process; programs of such an
    agent are subprocesses on this machine, unless its runtime is set. The library's own defaults are a shell on the host, and a
    rented sandbox.
    """
    from verifiers.v1 import SubprocessConfig, default_harness_id, harness_config_type

    from rollmill.tasks.rollout.environments.verifiers.private_verifiers import agent_config_fields

    seats: dict[str, Any] = {}
    for seat, settings in agent_config_fields(config).items():
        changes: dict[str, Any] = {}
        if settings.harness is None and default_harness_id(config.taskset.id) != config.taskset.id:
            changes["harness"] = harness_config_type(CHAT_PLUGIN)(id=CHAT_PLUGIN)
            if "runtime" not in settings.model_fields_set:
                changes["runtime"] = SubprocessConfig()
        seats[seat] = settings.model_copy(update=changes)
    return config.model_copy(update=seats)


def _select_split_tasks(environment: Any, arguments: Mapping[str, Any]) -> list[Any]:
    from pydantic import ValidationError
    from verifiers.v1 import SelectConfig

    try:
        chosen = environment.taskset.select(SelectConfig(**arguments.get(SELECT, {})))
    except (ValidationError, ValueError, TypeError) as error:
        raise ConfigError(ARGUMENTS_FIELD, dict(arguments), f"{SELECT}: {error}") from error
    if not chosen.bounded:
        remedy = f'the environment has endless problems: set a limit, {{"{SELECT}": {{"limit": 2000}}}}'
        raise ConfigError(ARGUMENTS_FIELD, dict(arguments), remedy)
    try:
        return list(chosen)
    except Exception as error:
        # User code may raise anything.
        remedy = f"its problems cannot be loaded; {type(error).__name__}: {error}"
        raise ConfigError(FIELD, f"{PREFIX}{environment.taskset.config.id}", remedy) from error


KEEP_STATES_FIELD = "rollout.keep_states"
TEXT = "string"


def parse_state_columns(names: Sequence[str]) -> Mapping[str, str]:
    """Parse the setting rollout.keep_states: return the type of each state column to keep, by name.

    Example: ("rung_up:int64", "history") is {"rung_up": "int64", "history": "string"}.

    Raises:
        ConfigError: a name is not a valid column name, or a type is unknown.
    """
    columns = {name: kind or TEXT for name, _, kind in (each.partition(":") for each in names)}
    try:
        check_columns(columns)
    except SchemaError as error:
        raise ConfigError(KEEP_STATES_FIELD, tuple(names), str(error)) from error
    return columns


def read_state_values(trace: Any, columns: Mapping[str, str]) -> Mapping[str, object]:
    """Return the values of `columns` from a trace's state, else from its info; in a text column, other values become JSON."""
    if trace is None or not columns:
        return {}
    state = trace.state.model_dump(mode="json", include=set(columns))
    known = {name: trace.info[name] for name in columns if name in trace.info} | state
    return {
        name: json.dumps(value) if columns[name] == TEXT and not isinstance(value, str | None) else value
        for name, value in known.items()
    }
