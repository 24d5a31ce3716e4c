"""Settings by step: those that a run's earlier steps were trained under, before a resume or a fork changed them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollmill.tasks.store.run.former_settings import StoredSettings
from rollmill.tasks.store.run.immutable_settings import get_setting


@dataclass(frozen=True, slots=True)
class EarlierSettings:
    """Settings that a run's steps were trained under until they changed.

    Attributes:
        until_step: first step that has later settings.
        settings: values by dotted name, as "train.lr".
    """

    until_step: int
    settings: StoredSettings


def select_settings(config: Mapping[str, Any], by_step: Mapping[str, Any]) -> dict[str, Any]:
    """Return some settings of a configuration by dotted name; `by_step` has their defaults, which count for one that it lacks."""
    return {name: get_setting(config, name, default) for name, default in by_step.items()}


def keep_earlier(
    earlier: Sequence[EarlierSettings],
    configs: Sequence[tuple[int, Mapping[str, Any]]],
    given: Mapping[str, Any] | None,
    by_step: Mapping[str, Any],
) -> tuple[EarlierSettings, ...]:
    """Return the records of a run's trained steps, in which the last one is left out if later steps have the same settings.

    Args:
        earlier: the records so far, oldest first.
        configs: of the steps that no record is of: the first step after them, and their configuration, oldest first. The last one
            has the number of trained steps, which no record exceeds.
        given: the configuration of all later steps; None: of a fork, which keeps the last record, because it takes the source's
            present settings for steps without a record.
        by_step: defaults, by dotted name, of the settings that are recorded.

    Example: with "train.lr" in `by_step`, a change from 1e-6 to 1e-5 at step 4 gives one record, of 1e-6 until step 4.
    """
    kept: list[EarlierSettings] = []
    n_steps = configs[-1][0]
    for each in (
        *earlier,
        *(EarlierSettings(step, select_settings(config, by_step)) for step, config in configs),
    ):
        until, settings = min(each.until_step, n_steps), {**by_step, **each.settings}
        # Settings that no step was trained under leave no record.
        if until <= (kept[-1].until_step if kept else 0):
            continue
        if kept and kept[-1].settings == settings:
            kept.pop()
        kept.append(EarlierSettings(until, settings))
    # Changed back, or not changed at all.
    if given is not None and kept and kept[-1].settings == select_settings(given, by_step):
        kept.pop()
    return tuple(kept)


def list_setting_changes(
    earlier: Sequence[EarlierSettings], config: Mapping[str, Any]
) -> dict[int, list[str]]:
    """List the settings that changed as "NAME: BEFORE -> AFTER", by the first step that has the new values.

    Example: {4: ["train.lr: 1e-06 -> 1e-05"]}.
    """
    changes: dict[int, list[str]] = {}
    for number, each in enumerate(earlier):
        now = select_settings(config, each.settings)
        after = earlier[number + 1].settings if number + 1 < len(earlier) else now
        changes[each.until_step] = [
            f"{name}: {value!r} -> {after.get(name, value)!r}"
            for name, value in each.settings.items()
            if after.get(name, value) != value
        ]
    return {step: lines for step, lines in changes.items() if lines}


def describe_setting_changes(earlier: Sequence[EarlierSettings], config: Mapping[str, Any]) -> list[str]:
    """Return a line for each change, as "from step 4 on: train.lr: 1e-06 -> 1e-05"."""
    changes = list_setting_changes(earlier, config)
    return [f"from step {step} on: {', '.join(lines)}" for step, lines in changes.items()]
