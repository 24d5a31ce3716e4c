"""The arguments of plug-ins, checked where a flow run is created for a worker, whose code may not all be here."""

from collections.abc import Iterator, Mapping
from typing import Any

from rollmill.flows.checks.preflight import check_loss
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.environments import environment_configs, name_environment
from rollmill.tasks.config import find_plugins
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.rollout.environment import ENVIRONMENTS, Configurable, environment_library
from rollmill.tasks.score.advantages import ADVANTAGES, Advantage, resolve_advantage
from rollmill.tasks.score.score_function import find_signature, load_object
from rollmill.tasks.score.terms import SCORERS
from rollmill.tasks.user_code.arguments import bind_arguments
from rollmill.tasks.user_code.plug_in import PlugIn


def check_plug_in_arguments(config: RunConfig) -> None:
    """Refuse wrong arguments of the plug-ins that can be imported here; no plug-in is created.

    The others, and everything else that a plug-in needs, are checked by the flow on the worker's machine.

    Raises:
        ConfigError: names FIELD.args.
    """
    for name, each in environment_configs(config).items():
        with name_environment(config, name):
            _check_environments(each)
            for field, scorer in _list_scorers(each):
                found = _import_plug_in(scorer, {**find_plugins("scorers"), **SCORERS})
                if callable(found) or hasattr(found, "score"):
                    taker, n_positional = find_signature(found)
                    bind_arguments(field, taker, scorer.args, n_positional)
            advantage = each.score.advantage
            found = ADVANTAGES.get(advantage.name) or _import_plug_in(advantage, find_plugins("advantages"))
            if callable(found) or isinstance(found, Advantage):
                resolve_advantage(advantage)
    # As before a run here, an attached trainer may have code that is missing here.
    if not config.train.url:
        try:
            check_loss(config.train, config.start_timeout_s)
        except ConfigError as error:
            if error.field.startswith("train.loss.args"):
                raise


def _check_environments(config: RunConfig) -> None:
    """Check the environment, and the one that an agent has its problems from; a library is imported by workers alone."""
    if environment_library(config.rollout):
        return
    given = [config.rollout.environment]
    if given[0].name == "agent":
        given.append(config.rollout.agent.problems)
    for each in given:
        found = _import_plug_in(each, {**find_plugins("environments"), **ENVIRONMENTS})
        if isinstance(found, Configurable):
            bind_arguments("rollout.environment", found.from_config, each.args, 1)
        elif callable(found):
            bind_arguments("rollout.environment", found, each.args)


def _list_scorers(config: RunConfig) -> Iterator[tuple[str, PlugIn]]:
    """Yield the scorers with the settings that name them."""
    if config.score.sum:
        for number, each in enumerate(config.score.sum):
            yield f"score.sum.{number}.scorer", each.scorer
    else:
        yield "score.scorer", config.score.scorer
    if config.evaluate.scorer:
        yield "evaluate.scorer", config.evaluate.scorer


def _import_plug_in(plug_in: PlugIn, registered: Mapping[str, str]) -> Any:
    """Return what a plug-in names; None if it cannot be imported here."""
    try:
        return load_object(registered.get(plug_in.name, plug_in.name))
    except (Exception, SystemExit):  # noqa: BLE001 - foreign code: whatever it raises, the worker may have what it lacks
        return None
