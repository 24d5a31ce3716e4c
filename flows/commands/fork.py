"""What `rollmill fork` does: a new run that begins at a step of another, under other settings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.config import RunConfig
from flows.recipe import start_model_folder
from flows.running.folder import run_folder
from flows.settings import fixed_settings, overridden, validate
from tasks.errors import RunMismatchError
from tasks.store.fixed import differences, value_of
from tasks.store.fork import fork
from tasks.store.layout import RunFolder
from tasks.store.manifest import read_manifest

OF_THE_WEIGHTS = ("model", "start_model.", "train.dtype", "train.lora.")
"""Fixed settings, or sections of them, that a checkpoint is made of; a fork has its source's."""
OF_THE_NUMBERS = ("rollout.groups_per_step",)
REFILLS = "rollout.max_refill_groups"
"""Fixed settings by which groups are numbered, from the first step on; the refills may become more in a fork."""


def prepare_fork(source: RunFolder, step: int, name: str, overrides: Sequence[str]) -> RunConfig:
    """Bring over what the new run begins with; returns its settings: the source's, but for `overrides`.

    Raises:
        ConfigError: the step has not been trained, the name is another run's, or a setting is wrong.
        RunMismatchError: an override is of what the weights or the groups' numbers depend on.
        StoreError: something could not be read or written.
    """
    config = forked_config(source, overrides)
    fork(source, step, run_folder(name, config), config.model_dump(mode="json"), config.store)
    return config


def forked_config(source: RunFolder, overrides: Sequence[str]) -> RunConfig:
    """The settings of a fork; its start model is the source's, by its folder, whatever its seed."""
    stored = read_manifest(source).config
    config = validate(overridden(stored, overrides))
    kept = {
        name: default
        for name, default in fixed_settings().items()
        if name.startswith(OF_THE_WEIGHTS) or name in OF_THE_NUMBERS
    }
    if lines := differences(stored, config.model_dump(mode="json"), kept):
        raise RunMismatchError(
            f"a fork of {source.location} has these settings of it, on which its weights and groups depend:\n"
            + "\n".join(lines)
        )
    _check_refills(stored, config, source)
    if config.model:
        return config
    model = start_model_folder(validate(stored))
    start_model = config.start_model.model_copy(update={"enabled": False})
    return config.model_copy(update={"model": str(Path(model).absolute()), "start_model": start_model})


def _check_refills(stored: dict[str, Any], config: RunConfig, source: RunFolder) -> None:
    """Refuse fewer refills a step than the source's: numbers of groups that it has sampled would be given again."""
    before, now = value_of(stored, REFILLS, 0), config.rollout.max_refill_groups
    if not isinstance(before, int) or now >= before:
        return
    raise RunMismatchError(
        f"{REFILLS} = {now}: the steps that a fork of {source.location} begins with are numbered for {before} refills "
        "each; give as many, or more"
    )
