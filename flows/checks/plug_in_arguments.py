"""The arguments of plug-ins: checked where a flow run is created for a worker, whose code may not all be here, and described."""

from collections.abc import Callable, Iterator, Mapping
from inspect import getdoc, isclass
from typing import Any

from rollmill.flows.checks.preflight import check_loss
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.environments import environment_configs, name_environment
from rollmill.tasks.config import find_plugins, import_named
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.rollout.environment import ENVIRONMENTS, Configurable, environment_library
from rollmill.tasks.score.advantages import ADVANTAGES, Advantage, resolve_advantage
from rollmill.tasks.score.score_function import find_signature, load_object
from rollmill.tasks.score.terms import SCORERS
from rollmill.tasks.train.setting_rules import HAS_RATIO
from rollmill.tasks.user_code.arguments import bind_arguments, describe_arguments
from rollmill.tasks.user_code.plug_in import PlugIn


def check_plug_in_arguments(config: RunConfig) -> None:
    """Refuse wrong arguments of the plug-ins that can be imported here; no plug-in is created.

    The others, and everything else that a plug-in needs, are checked by the flow on the worker's machine.

    Raises:
        ConfigError: names FIELD.args.
    """
    for name, each in environment_configs(config).items():
        with name_environment(config, name):
            for field, plug_in, taker, n_positional in _list_takers(each, _import_plug_in):
                bind_arguments(field, taker, plug_in.args, n_positional)
            if isinstance(_import_advantage(each, _import_plug_in), Advantage):
                resolve_advantage(each.score.advantage)
    # As before a run here, an attached trainer may have code that is missing here.
    if not config.train.url:
        try:
            check_loss(config.train, config.start_timeout_s)
        except ConfigError as error:
            if error.field.startswith("train.loss.args"):
                raise


def describe_plug_in_arguments(config: RunConfig) -> dict[str, list[str]]:
    """Return a line for each argument that the plug-ins of a run take, by the setting that names the plug-in.

    Environments of libraries, which workers alone import, are left out.

    Raises:
        ConfigError: a plug-in cannot be imported here.
    """
    # It takes a second to import, and other uses of this module do without.
    from prefect.utilities.callables import parameter_docstrings

    own = {each.name: each.overrides() for each in config.environments}
    found: dict[str, list[str]] = {}
    for name, each in environment_configs(config).items():
        with name_environment(config, name):
            takers = list(_list_takers(each, _import_given))
        if each.train.loss.name not in HAS_RATIO:
            loss = _import_given("train.loss", each.train.loss.name, find_plugins("losses"))
            takers.append(("train.loss", each.train.loss, loss, 1))
        for field, _, taker, n_positional in takers:
            is_own = any(f"{field}.".startswith(f"{given}.") for given in own.get(name, ()))
            shown = f"environments.{name}.{field}" if is_own else field
            documented = (taker.__init__, taker) if isclass(taker) else (taker,)
            texts = {
                key: text for one in documented for key, text in parameter_docstrings(getdoc(one)).items()
            }
            found[shown] = describe_arguments(shown, taker, texts, n_positional)
    return found


def _list_takers(
    config: RunConfig, load: Callable[[str, str, Mapping[str, str]], Any]
) -> Iterator[tuple[str, PlugIn, Callable[..., Any], int]]:
    """Yield the plug-ins of the flow's process: setting, plug-in, what takes its arguments, and how many it has by position besides.

    `load` imports the plug-in that a setting names, or returns None.
    """
    # A library is imported by workers alone. An agent has its problems from another environment.
    environments = (
        {} if environment_library(config.rollout) else {"rollout.environment": config.rollout.environment}
    )
    if "rollout.environment" in environments and config.rollout.environment.name == "agent":
        environments["rollout.agent.problems"] = config.rollout.agent.problems
    for field, each in environments.items():
        found = load(field, each.name, {**find_plugins("environments"), **ENVIRONMENTS})
        if isinstance(found, Configurable):
            yield field, each, found.from_config, 1
        elif callable(found):
            yield field, each, found, 0
    for field, each in _list_scorers(config):
        found = load(field, each.name, {**find_plugins("scorers"), **SCORERS})
        if callable(found) or hasattr(found, "score"):
            yield field, each, *find_signature(found)
    found = _import_advantage(config, load)
    if callable(found) and not isinstance(found, Advantage):
        yield "score.advantage", config.score.advantage, found, 1


def _import_advantage(config: RunConfig, load: Callable[[str, str, Mapping[str, str]], Any]) -> Any:
    name = config.score.advantage.name
    return ADVANTAGES.get(name) or load("score.advantage", name, find_plugins("advantages"))


def _list_scorers(config: RunConfig) -> Iterator[tuple[str, PlugIn]]:
    """Yield the scorers with the settings that name them."""
    if config.score.sum:
        for number, each in enumerate(config.score.sum):
            yield f"score.sum.{number}.scorer", each.scorer
    else:
        yield "score.scorer", config.score.scorer
    if config.evaluate.scorer:
        yield "evaluate.scorer", config.evaluate.scorer


def _import_given(field: str, name: str, registered: Mapping[str, str]) -> Any:
    """Return what a plug-in names, None for none; ConfigError if it cannot be imported here."""
    return import_named(field, name, registered) if name else None


def _import_plug_in(_field: str, name: str, registered: Mapping[str, str]) -> Any:
    """Return what a plug-in names; None if it cannot be imported here."""
    try:
        return load_object(registered.get(name, name))
    except (Exception, SystemExit):  # noqa: BLE001 - foreign code: whatever it raises, the worker may have what it lacks
        return None
