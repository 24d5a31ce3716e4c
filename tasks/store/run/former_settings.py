"""Arguments of environments and losses as older runs store them, in separate settings, read in the form of today."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator

ARGUMENTS, OPTIONS = "environment_args", "loss_options"
# The settings' defaults in these runs.
_ENVIRONMENT, _PROBLEMS, _LOSS = "prompts", "prompts", "ppo_clip"


def read_former(stored: dict[str, Any]) -> dict[str, Any]:
    """Return stored settings, nested or by dotted name, in which arguments are with the name that they are for.

    Older runs have `rollout.environment_args`, a JSON object, and `train.loss_options`, NAME=VALUE each. What cannot be read is left.

    Example: {"train": {"loss": "a:b", "loss_options": ["k=2"]}} gives {"train": {"loss": {"name": "a:b", "args": {"k": 2}}}}.
    """
    if f"train.{OPTIONS}" in stored:
        train = {name.removeprefix("train."): each for name, each in stored.items()}
        return {f"train.{name}": each for name, each in _join_options(train).items()}
    found = dict(stored)
    if isinstance(found.get("train"), dict):
        found["train"] = _join_options(found["train"])
    rollout = found.get("rollout")
    if isinstance(rollout, dict):
        found["rollout"] = _join_arguments(rollout, {})
    entries = found.get("environments")
    if isinstance(entries, list):
        found["environments"] = [
            {**each, "rollout": _join_arguments(each["rollout"], rollout or {})}
            if isinstance(each, dict) and isinstance(each.get("rollout"), dict)
            else each
            for each in entries
        ]
    return found


StoredSettings = Annotated[dict[str, Any], AfterValidator(read_former)]


def _join_options(train: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of the section train whose loss has the options as arguments."""
    found = dict(train)
    try:
        args = {
            name: yaml.safe_load(text) for name, _, text in (each.partition("=") for each in train[OPTIONS])
        }
    except (KeyError, AttributeError, TypeError, yaml.YAMLError):
        return found
    del found[OPTIONS]
    return found | ({"loss": {"name": found.get("loss", _LOSS), "args": args}} if args else {})


def _join_arguments(rollout: Mapping[str, Any], of_run: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of the section rollout whose environment has the arguments; those of an agent are for its problems.

    Settings that an entry of `environments` lacks are in `of_run`.
    """
    found = dict(rollout)
    # An entry with another environment has the run's arguments too.
    inherited = of_run.get(ARGUMENTS, "") if "environment" in found else ""
    try:
        args = json.loads(found.get(ARGUMENTS, inherited) or "{}")
    except (TypeError, ValueError):
        return found
    found.pop(ARGUMENTS, None)
    name = found.get("environment", of_run.get("environment", _ENVIRONMENT))
    if not args:
        return found
    if name == "agent":
        agent = {**of_run.get("agent", {}), **found.get("agent", {})}
        problems = {"name": agent.get("problems", _PROBLEMS), "args": args}
        return found | {"agent": {**found.get("agent", {}), "problems": problems}}
    return found | {"environment": {"name": name, "args": args}}
