"""What the commands `rescore`, `evaluate`, `retrain`, `replay` and `verify-sync` do."""

import asyncio
import re
from collections.abc import Coroutine, Sequence
from typing import Any

import typer

from flows.checks.evaluable import chosen_version
from flows.checks.offline import check_offline, check_tokenizers, steps_of_sources
from flows.checks.preflight import check_trainer, preflight
from flows.commands.starting import train_here
from flows.config import RescoreConfig, RunConfig
from flows.deploying.prefect_api import lead_to_prefect
from flows.policies.comparison import versions_of
from flows.presets import preset_name, preset_values
from flows.running.folder import existing_run, is_run, root_of, run_folder
from flows.settings import fixed_settings, overridden, parsed, validate
from tasks.errors import ConfigError
from tasks.store.fixed import check_fixed
from tasks.store.layout import RunFolder
from tasks.store.manifest import has_manifest, read_manifest
from tasks.store.resume import complete_checkpoints
from tasks.store.sources import check_sources

NOTHING_CHANGED = "stopped; the run is as it was, and the same command begins anew"
NOT_COMPARED = "stopped; not all was compared, and the same command begins anew"
"""What is said of commands that cannot be gone on with."""


def rescore_config(
    folder: RunFolder,
    overrides: Sequence[str],
    scorer: str = "",
    steps: str = "",
    *,
    evaluations: bool = False,
    redo_failed: bool = False,
) -> RescoreConfig:
    """Settings of rescoring: those of the run where it has them, and what was given.

    Args:
        folder: of the run.
        overrides: key=value.
        scorer: name or import path; empty: by the settings.
        steps: "A:B" for steps A to B - 1; either may be left out; empty: all.
        evaluations: score held-out trajectories too.
        redo_failed: score again what the scorer failed on.

    Raises:
        ConfigError: a setting is wrong.
    """
    stored = read_manifest(folder).config
    values = {section: stored.get(section, {}) for section in ("score", "store", "observe")}
    if scorer:
        values["score"] = values["score"] | {"scorer": scorer, "sum": []}
    values |= _steps(steps) | ({"evaluations": True} if evaluations else {})
    values |= {"redo_failed": True} if redo_failed else {}
    values["store"] = values["store"] | {"root": root_of(folder)}
    return parsed(RescoreConfig, overridden(values, overrides))


def rescore_here(folder: RunFolder, config: RescoreConfig) -> None:
    """Run the flow rescore in this process.

    Raises:
        ConfigError: something is missing; nothing has been started.
    """
    from flows.running.unscored import check_rescoring, is_rescored

    check_rescoring(folder, config)
    lead_to_prefect()
    from flows.commands.ending import flow_command
    from flows.rescore import rescore

    with flow_command(lambda: is_rescored(folder, config), config.observe.exit_timeout_s):
        asyncio.run(rescore(folder.name, config))


def evaluate_config(
    origin: str, overrides: Sequence[str], version: int = -1, name: str = ""
) -> tuple[str, RunConfig]:
    """The name of the run that is evaluated, and its settings.

    Args:
        origin: a run, with its settings; or a preset, whose start model is evaluated as version 0 of a run.
        overrides: key=value.
        version: policy version; -1: the last with a checkpoint.
        name: of a preset's run; empty: the preset's.

    Raises:
        ConfigError: a setting is wrong, or there is neither such a run nor such a preset.
    """
    found = existing_run(origin) if is_run(origin) else None
    values = read_manifest(found).config if found else preset_values(origin)
    values["evaluate"] = values.get("evaluate", {}) | {"version": version}
    if found:
        values["store"] = values.get("store", {}) | {"root": root_of(found)}
    return name or (found.name if found else preset_name(origin)), validate(overridden(values, overrides))


def evaluate_here(run_name: str, config: RunConfig) -> None:
    """Run the flow evaluate in this process.

    Raises:
        ConfigError: something is missing; nothing has been started.
        RunMismatchError: a setting is given that would make another run of it.
    """
    folder = run_folder(run_name, config)
    chosen_version(folder, config.evaluate.version)
    if has_manifest(folder):
        stored = read_manifest(folder).config
        check_fixed(folder.location, stored, config.model_dump(mode="json"), fixed_settings())
    preflight(config, trains=False)
    lead_to_prefect()
    from flows.commands.ending import flow_command
    from flows.evaluation import evaluate

    with flow_command(lambda: False, config.observe.exit_timeout_s):
        asyncio.run(evaluate(run_name, config))


def retrain_config(
    origin: str, overrides: Sequence[str], sources: Sequence[str] = (), scores: str = ""
) -> RunConfig:
    """Settings of a run that trains from stored rollouts.

    Args:
        origin: a run, whose settings are taken and whose rollouts are trained on unless `sources` says otherwise;
            or a preset.
        overrides: key=value.
        sources: runs to train from.
        scores: NAME@VERSION.

    Raises:
        ConfigError: a setting is wrong, or a source is no run.
    """
    try:
        folder = existing_run(origin)
        values: dict[str, Any] = read_manifest(folder).config
        values["retrain"] = {}
        sources = sources or [folder.location]
    except ConfigError:
        values = preset_values(origin)
    chosen: dict[str, Any] = {"sources": [existing_run(each).absolute for each in sources]} if sources else {}
    if scores:
        chosen["scores"] = scores
    values["retrain"] = values.get("retrain", {}) | chosen
    return validate(overridden(values, overrides))


def retrain_here(config: RunConfig, name: str, *, again: bool) -> None:
    """Run the flow retrain in this process.

    Args:
        config: all settings.
        name: folder of the new run below `store.root`.
        again: move a finished run of that name to NAME-N, and start anew.

    Raises:
        ConfigError: something is missing; nothing has been started.
        RunFinishedError, RunMismatchError: the folder's run cannot be gone on with like this.
    """
    if not again:
        check_sources(run_folder(name, config))
    steps_of_sources(config)
    check_offline(config)
    check_tokenizers(config)
    if run_folder(name, config).absolute in config.retrain.sources:
        raise ConfigError("--name", name, "a run is not trained from itself; give another name")
    preflight(config, samples=config.evaluate.enabled)

    def begun() -> Coroutine[Any, Any, str]:
        from flows.retrain import retrain

        return retrain(name, config)

    train_here(config, name, begun, again=again)


def replay_here(folder: RunFolder, first: int | None, last: int | None) -> None:
    """Run the flow replay in this process.

    Raises:
        ConfigError: there is nothing to replay, or something is missing; nothing has been started.
        ReplayError: it did not give the same.
    """
    config = validate(read_manifest(folder).config)
    check_sources(folder)
    versions = versions_of(complete_checkpoints(folder), first, last)
    check_trainer(config)
    lead_to_prefect()
    from flows.commands.ending import flow_command
    from flows.replay import replay

    with flow_command(lambda: False, config.observe.exit_timeout_s, NOTHING_CHANGED):
        typer.echo(asyncio.run(replay(folder.location, versions.first, versions.last)))


def check_replay(
    *, attribute: bool, step: int | None, versions: tuple[int | None, int | None], traffic: int, as_json: bool
) -> None:
    """Refuse options of `replay` that do not go together; ConfigError names one."""
    if attribute:
        if step is None:
            raise ConfigError("--attribute", True, "it measures one step: give --step too")
        for name, version in zip(("--from", "--to"), versions, strict=True):
            if version is not None:
                raise ConfigError(name, version, "--attribute measures one step, by --step: leave this out")
    elif step is not None or traffic or as_json:
        name = "--step" if step is not None else "--synthetic-traffic" if traffic else "--json"
        raise ConfigError(name, step or traffic or as_json, "it goes with --attribute alone")


def attribute_here(folder: RunFolder, step: int, n_traffic: int, trainer: str, *, as_json: bool) -> None:
    """Run the flow attribute in this process, and print what it measured.

    Args:
        folder: of the run.
        step: one that is done.
        n_traffic: tasks of synthetic traffic.
        trainer: `launch`, or `none` to leave out the phases that need one.
        as_json: print one JSON object.

    Raises:
        ConfigError: the run has no such step, or something is missing; nothing has been started.
    """
    if trainer not in ("launch", "none"):
        raise ConfigError("--trainer", trainer, "give launch or none")
    manifest = read_manifest(folder)
    config = validate(manifest.config)
    from flows.replaying.stored_step import check_step

    check_step(folder, manifest, step)
    with_trainer = trainer == "launch" and manifest.trains
    if with_trainer:
        check_trainer(config)
    lead_to_prefect(says_on_stderr=as_json)
    from flows.commands.ending import flow_command
    from flows.looking.terminal import print_json, terminal
    from flows.replaying.attribution import attribute
    from flows.replaying.attribution_table import attribution_page

    with flow_command(lambda: False, config.observe.exit_timeout_s, NOTHING_CHANGED):
        measured = asyncio.run(attribute(folder.location, step, n_traffic, with_trainer))
        if as_json:
            print_json(measured.values())
        else:
            terminal().print(attribution_page(measured), soft_wrap=True)


def verify_sync_here(folder: RunFolder, overrides: Sequence[str]) -> None:
    """Run the flow verify-sync in this process.

    Raises:
        ConfigError: a setting is wrong, or something is missing; nothing has been started.
        RunMismatchError: a setting is given that would make another run of it.
        RunLockedError: the run is going on.
        SyncError: a server does not have the trainer's weights.
    """
    manifest = read_manifest(folder)
    config = validate(overridden(manifest.config, overrides))
    check_fixed(folder.location, manifest.config, config.model_dump(mode="json"), fixed_settings())
    check_sources(folder)
    preflight(config)
    lead_to_prefect()
    from flows.commands.ending import flow_command
    from flows.replaying.verify_sync import verify_sync

    with flow_command(lambda: False, config.observe.exit_timeout_s, NOT_COMPARED):
        typer.echo(asyncio.run(verify_sync(folder.location, config)))


def _steps(text: str) -> dict[str, int]:
    """Example: "2:5" gives first_step 2 and last_step 4."""
    if not text:
        return {}
    match = re.fullmatch(r"(\d*):(\d*)", text)
    if not match or match[2] == "0":
        raise ConfigError("--steps", text, "write A:B for steps A to B - 1, such as 0:10, :10 or 30:")
    return {"first_step": int(match[1] or 0), "last_step": int(match[2]) - 1 if match[2] else -1}
