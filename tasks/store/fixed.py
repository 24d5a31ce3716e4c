"""Settings that may not change when a run is resumed."""

from collections.abc import Collection, Mapping
from typing import Any

from tasks.errors import RunMismatchError

_ABSENT = object()


def check_fixed(
    run: str, stored: Mapping[str, Any], given: Mapping[str, Any], fixed: Collection[str]
) -> None:
    """Compare fixed settings, by dotted name, of a stored and a given configuration.

    Example: with "train.dtype" among `fixed`, {"train": {"dtype": "fp32"}} and {"train": {"dtype": "bf16"}} differ.

    Raises:
        RunMismatchError: names every setting that differs, both its values and the remedy.
    """
    lines = [
        f"  {name}: the run has {_text(before)}, given is {_text(after)}"
        for name in sorted(fixed)
        if (before := _value(stored, name)) != (after := _value(given, name))
    ]
    if lines:
        raise RunMismatchError(
            f"{run} was begun with other settings that may not change:\n"
            + "\n".join(lines)
            + "\ngive the run's values to go on with it, or another name to begin a new run"
        )


def _value(config: Mapping[str, Any], name: str) -> object:
    value: Any = config
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _text(value: object) -> str:
    return "absent" if value is _ABSENT else repr(value)
