"""Settings of a run that is resumed: those that cannot change, and those that did."""

from collections.abc import Mapping
from typing import Any

from rollmill.tasks.errors import RunMismatchError


def check_immutable(
    run: str, stored: Mapping[str, Any], given: Mapping[str, Any], fixed: Mapping[str, Any]
) -> None:
    """Refuse to resume a run, called `run` in errors, with other values of settings that cannot change.

    `fixed` has the defaults of these settings by dotted name, which count for a configuration that is older than a setting.

    Example: with "train.dtype" in `fixed`, {"train": {"dtype": "fp32"}} and {"train": {"dtype": "bf16"}} differ.

    Raises:
        RunMismatchError: names each setting that differs, both values and the remedy.
    """
    if lines := list_differences(stored, given, fixed):
        raise RunMismatchError(
            f"{run} was begun with other settings that cannot change:\n"
            + "\n".join(lines)
            + "\ngive the run's values to resume it, or another name to begin a new run; `rollmill fork` begins one at a "
            "step of this one"
        )


def list_differences(
    stored: Mapping[str, Any], given: Mapping[str, Any], fixed: Mapping[str, Any]
) -> list[str]:
    """Describe each immutable setting that differs, with both values, in a line of text each."""
    return [
        f"  {name}: the run has {before!r}, given is {after!r}"
        for name, default in sorted(fixed.items())
        if (before := get_setting(stored, name, default)) != (after := get_setting(given, name, default))
    ]


def list_changes(stored: Mapping[str, Any], given: Mapping[str, Any], section: str = "") -> list[str]:
    """List the settings that differ between two configurations, as "NAME: STORED -> GIVEN", in the order of `given`.

    A setting that only one of them has is of another version, and left out.

    Example: {"steps": 2, "train": {"lr": 1e-6}} and {"steps": 40, "train": {"lr": 1e-6}} give ["steps: 2 -> 40"].
    """
    changes = []
    for key, after in given.items():
        if key not in stored:
            continue
        before, name = stored[key], f"{section}{key}"
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changes += list_changes(before, after, f"{name}.")
        elif before != after:
            changes.append(f"{name}: {before!r} -> {after!r}")
    return changes


def get_setting(config: Mapping[str, Any], name: str, default: object) -> object:
    """Return the value of a setting, given its dotted name; `default` if the configuration lacks it."""
    value: Any = config
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value
