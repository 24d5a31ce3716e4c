"""The commands `run`, `collect`, `retrain` and `fork`: flows that begin a run in a folder, or resume the one there."""

from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import typer

from rollmill.flows.checks.preflight import preflight
from rollmill.flows.commands.flow_process import run_flow
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.recipe import start_model_folder
from rollmill.flows.configuration.rules import list_warnings
from rollmill.flows.configuration.settings import (
    SETTINGS_BY_STEP,
    apply_overrides,
    find_fixed_settings,
    name_override,
    validate,
)
from rollmill.flows.offline.retrain_sources import (
    check_offline,
    check_replay_sources,
    check_source_sampling,
    check_tokenizers,
    find_source_steps,
)
from rollmill.flows.run.folder import check_movable, check_resumable, is_finished, move_aside, run_folder
from rollmill.tasks.errors import ConfigError, RunMismatchError
from rollmill.tasks.observe.spans import span
from rollmill.tasks.observe.step_clock import record_command
from rollmill.tasks.rollout.chat_logs.log_files import list_log_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.fork_copy import fork_run
from rollmill.tasks.store.run.immutable_settings import get_setting, list_differences
from rollmill.tasks.store.run.manifest import check_sources, read_manifest
from rollmill.tasks.store.run.resume import list_complete_checkpoints

# Fixed settings, or sections of them, that determine a checkpoint; a fork keeps its source's.
WEIGHT_SETTINGS = ("model", "start_model.", "train.dtype", "train.lora.")
# Fixed settings that determine the numbers of groups; a fork keeps its source's.
NUMBERING_SETTINGS = ("rollout.groups_per_step",)
# Fixed settings of training that hold for all steps of a trainer, also for the source's steps that a fork trains on again.
TRAINER_SETTINGS = (
    "train.kl.reference",
    "train.kl.model",
    "train.kl.urls",
    "train.kl.teacher",
    "train.replay_routing",
    "train.head_dtype",
)
# It determines the numbers of groups too; a fork may raise it.
REFILLS = "rollout.max_refill_groups"


def run_here(
    config: RunConfig, name: str, *, again: bool, redo_failed: bool = False, is_checked: bool = False
) -> None:
    """Run the flow post-train in this process.

    Args:
        config: all settings.
        name: folder of the run below `store.root`.
        again: move a finished run of that name to NAME-N and start a new one.
        redo_failed: sample failed trajectories of the steps without a batch again, and score again what the scorer failed on.
        is_checked: True if `preflight` has passed for this configuration.

    Raises:
        ConfigError: something is missing; nothing was started.
        RunFinishedError, RunMismatchError: the run in the folder cannot be resumed with these settings.
    """

    def call() -> Coroutine[Any, Any, str]:
        from rollmill.flows.post_train import post_train

        return post_train(name, config, redo_failed)

    for warning in list_warnings(config):
        typer.echo(f"rollmill: warning: {warning}", err=True)
    if not again:
        check_replay_sources(run_folder(name, config), config)
    if not is_checked:
        preflight(config)
    run_in_folder(call, name, config, again=again)


def collect_here(config: RunConfig, name: str, *, again: bool, redo_failed: bool = False) -> None:
    """Run the flow collect in this process; arguments and errors as for `run_here`."""

    def call() -> Coroutine[Any, Any, str]:
        from rollmill.flows.collect import collect

        return collect(name, config, redo_failed)

    preflight(config, trains=False)
    run_in_folder(call, name, config, again=again, trains=False)


def import_here(config: RunConfig, name: str, files: Sequence[str], *, redo_failed: bool = False) -> None:
    """Run the flow import in this process.

    Args:
        config: all settings.
        name: folder of the run below `store.root`.
        files: of logs, or folders of such files.
        redo_failed: score again what the scorer failed on.

    Raises:
        ConfigError: a file is missing or wrong, or something else that it needs; nothing was started.
    """
    list_log_files(files)

    def call() -> Coroutine[Any, Any, str]:
        from rollmill.flows.import_logs import import_logs

        return import_logs(name, config, list(files), redo_failed)

    preflight(config, samples=False, trains=False)
    with record_command():
        run_flow(call, is_done=lambda: is_finished(run_folder(name, config)))


def retrain_here(config: RunConfig, name: str, *, again: bool) -> None:
    """Run the flow retrain in this process; arguments and errors as for `run_here`."""

    def call() -> Coroutine[Any, Any, str]:
        from rollmill.flows.retrain import retrain

        return retrain(name, config)

    if not again:
        check_sources(run_folder(name, config))
    # First, since it refuses missing sources.
    check_offline(config)
    find_source_steps(config)
    check_source_sampling(config, config.retrain.sources)
    check_tokenizers(config, config.retrain.sources)
    # Both would write to the folder that they read.
    if run_folder(name, config).absolute in config.retrain.sources:
        raise ConfigError("--name", name, "a run cannot train from itself; give another name")
    preflight(config, samples=config.evaluate.every > 0)
    run_in_folder(call, name, config, again=again)


def run_in_folder(
    call: Callable[[], Coroutine[Any, Any, str]],
    name: str,
    config: RunConfig,
    *,
    again: bool,
    trains: bool = True,
) -> None:
    """Run, in this process, a flow that creates the run `name` below `store.root` or resumes it.

    Args:
        call: imports the flow and calls it with its arguments.
        name: folder of the run below `store.root`.
        config: all settings.
        again: move a finished run of that name to NAME-N and start a new one.
        trains: False for the flow collect.
    """
    folder = run_folder(name, config)
    is_replaced = again and is_finished(folder)

    def make_room() -> None:
        # Only once there is a Prefect server: without one the finished run keeps its name.
        if is_replaced:
            move_aside(folder, config.store)

    with record_command():
        with span("checking"):
            if is_replaced:
                check_movable(folder)
            else:
                check_resumable(folder, config, trains=trains)
        run_flow(call, before=make_room, is_done=lambda: is_finished(folder))


def fork_here(source: RunFolder, step: int, name: str, overrides: Sequence[str]) -> None:
    """Create the run `name` as `prepare_fork` does, and run it; nothing is created if something that it needs is missing."""
    config = fork_config(source, overrides)
    preflight(config)
    if _scores_otherwise(source, config):
        warning = (
            f"steps and evaluations copied from {source.location} have rewards by its scorer, later ones by that of {name}: "
            f"`rollmill rescore {name} --evaluations` gives all rewards by the latter"
        )
        typer.echo(f"rollmill: warning: {warning}", err=True)
    # A second check would open another episode, which may be slow or paid for.
    run_here(prepare_fork(source, step, name, overrides), name, again=False, is_checked=True)


def _scores_otherwise(source: RunFolder, config: RunConfig) -> bool:
    """Return True if a fork has another scorer than its source, or another for evaluations."""
    stored, given = read_manifest(source).config, config.model_dump(mode="json")
    names = ("score.scorer", "score.sum", "evaluate.scorer")
    return any(
        get_setting(stored, each, None) not in (None, get_setting(given, each, None)) for each in names
    )


def prepare_fork(source: RunFolder, step: int, name: str, overrides: Sequence[str]) -> RunConfig:
    """Create the run `name` from the rows of `source` before `step` and its last checkpoint; returns the settings.

    Args:
        source: the run to fork.
        step: first step of the new run.
        name: folder of the new run below `store.root`.
        overrides: key=value, for settings that differ from those of `source`.

    Raises:
        ConfigError: the step was not trained, the name belongs to another run, or a setting is wrong.
        RunMismatchError: an override would change what the weights or the groups' numbers depend on.
        RunLockedError: another process writes to the new run.
        StoreError: something could not be read or written.
    """
    config = fork_config(source, overrides)
    values = config.model_dump(mode="json")
    _check_reapplied(source, step, values)
    fork_run(source, step, run_folder(name, config), values, config.store, SETTINGS_BY_STEP)
    return config


def fork_config(source: RunFolder, overrides: Sequence[str]) -> RunConfig:
    """Return the settings of a fork: those of `source` with `overrides`, and with the folder of its start model as `model`.

    Raises:
        RunMismatchError: an override would change what the weights or the groups' numbers depend on.
    """
    stored = read_manifest(source).config
    with name_override(source, overrides):
        config = validate(apply_overrides(stored, overrides))
    kept = {
        name: default
        for name, default in find_fixed_settings().items()
        if name.startswith(WEIGHT_SETTINGS) or name in NUMBERING_SETTINGS
    }
    if lines := list_differences(stored, config.model_dump(mode="json"), kept):
        raise RunMismatchError(
            f"a fork of {source.location} keeps these settings, which its weights and groups depend on:\n"
            + "\n".join(lines)
        )
    _check_refills(stored, config, source)
    if config.model:
        return config
    # A start model depends on the seed, which the fork may change; so it is named by its folder, absolute since the fork may be
    # resumed from another folder.
    model = start_model_folder(validate(stored))
    start_model = config.start_model.model_copy(update={"steps": 0})
    return config.model_copy(update={"model": str(Path(model).absolute()), "start_model": start_model})


def _check_reapplied(source: RunFolder, step: int, values: dict[str, Any]) -> None:
    """Raise RunMismatchError if a fork would train on stored steps again under settings that cannot change between two steps."""
    version = max((each for each in list_complete_checkpoints(source) if each <= step), default=0)
    fixed = {name: default for name, default in find_fixed_settings().items() if name in TRAINER_SETTINGS}
    if version < step and (lines := list_differences(read_manifest(source).config, values, fixed)):
        raise RunMismatchError(
            f"a fork of {source.location} at step {step} trains on its steps from {version} on again, which these settings "
            "would change:\n" + "\n".join(lines) + f"\nfork it at step {version}, or give the source's values"
        )


def _check_refills(stored: dict[str, Any], config: RunConfig, source: RunFolder) -> None:
    """Raise RunMismatchError if a fork has fewer `rollout.max_refill_groups` than its source.

    The fork would then use the numbers of the source's refill groups a second time.
    """
    before, now = get_setting(stored, REFILLS, 0), config.rollout.max_refill_groups
    if not isinstance(before, int):
        return
    # Each environment has numbers for as many.
    environments = get_setting(stored, "environments", ())
    reserved = before * max(1, len(environments) if isinstance(environments, list) else 1)
    if now * max(1, len(config.environments)) >= reserved:
        return
    raise RunMismatchError(
        f"{REFILLS} = {now}: the groups that a fork of {source.location} begins with are numbered for {reserved} refills "
        f"a step; give at least {-(-reserved // max(1, len(config.environments)))}"
    )
