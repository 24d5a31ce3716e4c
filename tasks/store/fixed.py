"""Settings that may not change when a run is resumed."""

from collections.abc import Mapping
from typing import Any

from tasks.errors import RunMismatchError


def check_fixed(
    run: str, stored: Mapping[str, Any], given: Mapping[str, Any], fixed: Mapping[str, Any]
) -> None:
    """Compare fixed settings of a stored and a given configuration.

    Args:
        run: what errors call the run.
        stored: its configuration.
        given: the one to go on with.
        fixed: the defaults of the fixed settings, by dotted name: a configuration that does not have one, because it
            is older than the setting, has its default.

    Example: with "train.dtype" in `fixed`, {"train": {"dtype": "fp32"}} and {"train": {"dtype": "bf16"}} differ.

    Raises:
        RunMismatchError: names every setting that differs, both its values and the remedy.
    """
    if lines := differences(stored, given, fixed):
        raise RunMismatchError(
            f"{run} was begun with other settings that may not change:\n"
            + "\n".join(lines)
            + "\ngive the run's values to go on with it, or another name to begin a new run; `rollmill fork` begins one at a "
            "step of this one"
        )


def differences(stored: Mapping[str, Any], given: Mapping[str, Any], fixed: Mapping[str, Any]) -> list[str]:
    """A line for each fixed setting that differs, with both its values."""
    return [
        f"  {name}: the run has {before!r}, given is {after!r}"
        for name, default in sorted(fixed.items())
        if (before := value_of(stored, name, default)) != (after := value_of(given, name, default))
    ]


def value_of(config: Mapping[str, Any], name: str, default: object) -> object:
    """A setting by its dotted name; the default when the configuration does not have it."""
    value: Any = config
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value
