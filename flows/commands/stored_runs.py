"""The commands `rescore`, `annotate`, `evaluate`, `replay`, `verify-sync` and `compact`, which work on a stored run."""

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from rollmill.flows.checks.machine_needs import check_trainer
from rollmill.flows.checks.preflight import preflight
from rollmill.flows.checks.teacher_machine import check_teacher_machine
from rollmill.flows.commands.flow_process import NOT_COMPARED, UNCHANGED, run_flow
from rollmill.flows.configuration.config import AnnotateConfig, RescoreConfig, RunConfig
from rollmill.flows.configuration.presets import preset_name, preset_values
from rollmill.flows.configuration.settings import (
    apply_overrides,
    find_fixed_settings,
    name_override,
    parse_settings,
    scorer_overrides,
    validate,
)
from rollmill.flows.offline.attribution_table import Attribution, attribution_page
from rollmill.flows.offline.replay_comparison import choose_versions
from rollmill.flows.offline.stored_step import check_step
from rollmill.flows.offline.teacher import check_annotation, is_annotated
from rollmill.flows.offline.unscored import check_rescoring, is_rescored
from rollmill.flows.run.folder import LAST_VERSION, choose_version, run_folder
from rollmill.tasks.errors import ConfigError, StoreError
from rollmill.tasks.look.comparisons.paired_evaluations import is_complete
from rollmill.tasks.look.tables.scores import explain_scorers, read_score_totals
from rollmill.tasks.look.tables.view import escape_controls
from rollmill.tasks.look.terminal.output import open_console, print_json
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import PARTITION_KEYS, RunFolder
from rollmill.tasks.store.run.immutable_settings import check_immutable
from rollmill.tasks.store.run.manifest import check_sources, has_manifest, read_manifest
from rollmill.tasks.store.run.resume import list_complete_checkpoints
from rollmill.tasks.store.run.run_search import distinct_runs, find_run, is_run, store_root
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.shards.compactor import Compactor


def rescore_config(
    folder: RunFolder,
    overrides: Sequence[str],
    scorer: str = "",
    steps: str = "",
    where: str = "",
    *,
    evaluations: bool = False,
    redo_failed: bool = False,
) -> RescoreConfig:
    """Return the settings of the flow rescore: those of the run, changed by the command line's options and overrides.

    Args:
        folder: of the run.
        overrides: key=value.
        scorer: name or import path, or {name: ..., args: ...} as YAML; empty: that of the settings.
        steps: "A:B" for steps A to B - 1; either may be left out; empty: all.
        where: condition in SQL on the groups to score; empty: all.
        evaluations: score held-out trajectories too.
        redo_failed: score again what the scorer failed on.

    Raises:
        ConfigError: a setting is wrong.
    """
    stored = read_manifest(folder).config
    values = {section: stored.get(section, {}) for section in ("score", "store", "observe")}
    if stored.get("environments") and not scorer and not values["score"].get("scorer"):
        remedy = (
            "the environments of the run have different scorers, which cannot score its rows again together; name one, "
            "for all rows or for those that --where chooses"
        )
        raise ConfigError("--scorer", "", remedy)
    values |= _parse_steps(steps) | ({"evaluations": True} if evaluations else {})
    values |= {"redo_failed": True} if redo_failed else {}
    values |= {"where": where} if where else {}
    values["store"] = values["store"] | {"root": store_root(folder)}
    overrides = (*scorer_overrides(scorer), *overrides)
    with name_override(folder, overrides):
        return parse_settings(RescoreConfig, apply_overrides(values, overrides))


def rescore_here(folder: RunFolder, config: RescoreConfig) -> None:
    """Run the flow rescore in this process; ConfigError if something is missing, before anything starts."""

    async def call() -> Group:
        from rollmill.flows.rescore import rescore

        await rescore(folder.name, config)
        return await asyncio.to_thread(_make_scores_table, folder)

    check_rescoring(folder, config)
    table: Group | None = run_flow(call, is_done=lambda: is_rescored(folder, config))
    # Nothing came back if only Prefect failed, at the end of the flow.
    open_console().print(table or _make_scores_table(folder))


def _make_scores_table(folder: RunFolder) -> Group:
    """Return a table for the terminal with each scorer's mean reward and its scored, failed and dropped trajectories.

    Below it is what the scorers' versions are digests of.
    """
    table = Table(title=f"{folder.location}: scores", title_justify="left")
    for column in ("scorer", "mean reward", "scored", "failed", "dropped"):
        table.add_column(column, justify="left" if column == "scorer" else "right")
    for each in read_score_totals(folder):
        counts = [str(each.by_status[status]) for status in ("scored", "failed", "dropped")]
        table.add_row(each.scorer, f"{each.reward:z.4f}", *counts)
    return Group(table, *(Text(escape_controls(line)) for line in explain_scorers(folder)))


def annotate_config(
    folder: RunFolder,
    overrides: Sequence[str],
    teacher: str,
    name: str = "",
    steps: str = "",
    where: str = "",
) -> AnnotateConfig:
    """Return the settings of the flow annotate: those of the run's servers, changed by the command line's options and overrides.

    Args:
        folder: of the run.
        overrides: key=value.
        teacher: folder of its model, its name on the Hugging Face hub, or with serve.urls the name that the servers have for it.
        name: under which its log-probabilities are stored; empty: the last part of `teacher`.
        steps: "A:B" for steps A to B - 1; either may be left out; empty: all.
        where: condition in SQL on the groups; empty: all.

    Raises:
        ConfigError: a setting is wrong.
    """
    stored = read_manifest(folder).config
    # The addresses of a run's servers are those of its policy.
    values: dict[str, Any] = {
        "serve": stored.get("serve", {}) | {"urls": []},
        "store": stored.get("store", {}) | {"root": store_root(folder)},
        "teacher": teacher,
        "name": name,
        "where": where,
        **_parse_steps(steps),
    }
    with name_override(folder, overrides):
        return parse_settings(AnnotateConfig, apply_overrides(values, overrides))


def annotate_here(folder: RunFolder, config: AnnotateConfig) -> None:
    """Run the flow annotate in this process; ConfigError if something is missing, before anything starts."""

    def call() -> Coroutine[Any, Any, str]:
        from rollmill.flows.annotate import annotate

        return annotate(folder.name, config)

    check_annotation(folder, config)
    if not is_annotated(folder, config):
        check_teacher_machine(config)
    run_flow(call, is_done=lambda: is_annotated(folder, config))


def evaluate_config(origin: str, overrides: Sequence[str], name: str = "") -> tuple[str, RunConfig]:
    """Return the name and the settings of the run to evaluate.

    Args:
        origin: a run, whose settings are taken; or a preset, whose start model becomes version 0 of a new run.
        overrides: key=value.
        name: of a preset's run; empty: the preset's.

    Raises:
        ConfigError: a setting is wrong, or there is neither such a run nor such a preset.
    """
    found = find_run(origin) if is_run(origin) else None
    values = read_manifest(found).config if found else preset_values(origin)
    if found:
        values["store"] = values.get("store", {}) | {"root": store_root(found)}
    with name_override(found, overrides) if found else nullcontext():
        return name or (found.name if found else preset_name(origin)), validate(
            apply_overrides(values, overrides)
        )


def evaluate_here(
    run_name: str, config: RunConfig, version: int = LAST_VERSION, *, redo_failed: bool = False
) -> None:
    """Run the flow evaluate in this process; `redo_failed` scores held-out answers again whose scorer failed.

    Raises:
        ConfigError: something is missing; nothing was started.
        RunMismatchError: a setting would make it another run.
    """

    def call() -> Coroutine[Any, Any, str]:
        from rollmill.flows.evaluate import evaluate

        return evaluate(run_name, config, version, redo_failed)

    folder = run_folder(run_name, config)
    samples = not is_complete(folder, choose_version(folder, version))
    if has_manifest(folder):
        _check_fixed(folder, config)
    preflight(config, samples=samples, trains=False)
    run_flow(call)


def retrain_config(
    origin: str, overrides: Sequence[str], sources: Sequence[str] = (), given: Mapping[str, str] | None = None
) -> RunConfig:
    """Return the settings of a run that trains from stored rollouts.

    Args:
        origin: a run, whose settings are taken and whose rollouts are trained on unless `sources` names others; or a preset.
        overrides: key=value.
        sources: runs to train from.
        given: further settings of `retrain` by name; empty ones are left as they are.

    Raises:
        ConfigError: a setting is wrong, or a source is not a run.
    """
    folder = find_run(origin) if is_run(origin) else None
    if folder:
        values = read_manifest(folder).config | {"retrain": {}}
        sources = sources or [folder.location]
    else:
        values = preset_values(origin)
    named = distinct_runs(map(find_run, sources))
    chosen: dict[str, Any] = {"sources": [each.absolute for each in named]} if named else {}
    chosen |= {name: each for name, each in (given or {}).items() if each}
    values["retrain"] = values.get("retrain", {}) | chosen
    with name_override(folder, overrides) if folder else nullcontext():
        return validate(apply_overrides(values, overrides))


def replay_here(folder: RunFolder, first: int | None, last: int | None) -> None:
    """Run the flow replay in this process.

    Raises:
        ConfigError: there is nothing to replay, or something is missing; nothing was started.
        ReplayError: the replayed weights or metrics differ from the stored ones.
    """

    def call() -> Coroutine[Any, Any, str]:
        from rollmill.flows.replay import replay

        return replay(folder.location, *versions)

    validate(read_manifest(folder).config)
    check_sources(folder)
    versions = choose_versions(list_complete_checkpoints(folder), first, last)
    check_trainer()
    typer.echo(run_flow(call, if_stopped=UNCHANGED))


def check_replay_options(
    *,
    attribute: bool,
    step: int | None,
    versions: tuple[int | None, int | None],
    traffic: int,
    trainer: str,
    as_json: bool,
) -> None:
    """Refuse options of `replay` that exclude each other; ConfigError names one."""
    if attribute:
        if step is None:
            raise ConfigError("--attribute", True, "it measures one step: give --step too")
        for name, version in zip(("--from", "--to"), versions, strict=True):
            if version is not None:
                raise ConfigError(name, version, "--attribute measures the step given by --step: omit this")
        return
    given = {
        "--step": step,
        "--synthetic-traffic": traffic or None,
        "--trainer": None if trainer == "launch" else trainer,
        "--json": as_json or None,
    }
    for name, value in given.items():
        if value is not None:
            raise ConfigError(name, value, "it needs --attribute")


def attribute_here(folder: RunFolder, step: int, n_traffic: int, trainer: str, *, as_json: bool) -> None:
    """Measure again what each phase of a stored step after its rollouts costs, in this process, and print the table.

    Args:
        folder: of the run.
        step: a finished step.
        n_traffic: tasks of synthetic traffic.
        trainer: `launch`, or `none` to leave out the phases that need one.
        as_json: print one JSON object.

    Raises:
        ConfigError: the run has no such step, or something is missing; nothing was started.
    """

    def call() -> Coroutine[Any, Any, Attribution]:
        from rollmill.flows.attribute import attribute

        return attribute(folder.location, step, n_traffic, with_trainer)

    if trainer not in ("launch", "none"):
        raise ConfigError("--trainer", trainer, "give launch or none")
    manifest = read_manifest(folder)
    validate(manifest.config)
    check_step(folder, manifest, step)
    with_trainer = trainer == "launch" and manifest.trains
    if with_trainer:
        check_trainer()
    measured = run_flow(call, if_stopped=UNCHANGED, prints_json=as_json)
    if as_json:
        print_json(asdict(measured))
    else:
        open_console().print(attribution_page(measured), soft_wrap=True)


def verify_sync_here(folder: RunFolder, overrides: Sequence[str]) -> None:
    """Run the flow verify-sync in this process.

    Raises:
        ConfigError: a setting is wrong, or something is missing; nothing was started.
        RunMismatchError: a setting would make it another run.
        RunLockedError: another process writes to the run.
        SyncError: a server's weights differ from the trainer's.
    """

    def call() -> Coroutine[Any, Any, str]:
        from rollmill.flows.verify_sync import verify_sync

        return verify_sync(folder.location, config)

    with name_override(folder, overrides):
        config = validate(apply_overrides(read_manifest(folder).config, overrides))
    _check_fixed(folder, config)
    check_sources(folder)
    preflight(config)
    typer.echo(run_flow(call, if_stopped=NOT_COMPARED))


def _check_fixed(folder: RunFolder, config: RunConfig) -> None:
    """Raise RunMismatchError, with both values, for settings that differ from the stored run's and cannot change on resume."""
    manifest = read_manifest(folder)
    fixed = find_fixed_settings(trains=manifest.trains)
    check_immutable(folder.location, manifest.config, config.model_dump(mode="json"), fixed)


def _parse_steps(text: str) -> dict[str, int]:
    """Parse "A:B" into the settings first_step = A and last_step = B - 1; ConfigError for other text.

    A left out is 0; B left out gives last_step -1, which means the last step; an empty text gives {}.

    Example: "2:5" gives {"first_step": 2, "last_step": 4}.
    """
    if not text:
        return {}
    match = re.fullmatch(r"(\d*):(\d*)", text)
    if not match or match[2] == "0":
        raise ConfigError("--steps", text, "write A:B for steps A to B - 1, such as 0:10, :10 or 30:")
    return {"first_step": int(match[1] or 0), "last_step": int(match[2]) - 1 if match[2] else -1}


async def compact_run(folder: RunFolder, grace_s: float | None, say: Callable[[str], None]) -> str:
    """Merge the small shards of a finished run, or of an unfinished one's steps up to its last checkpoint, into few.

    Superseded shards are removed.

    Args:
        folder: of the run, whose settings `store.compaction_...` are used.
        grace_s: seconds that superseded shards stay; None: the run's setting.
        say: prints a line.

    Returns:
        The number of shards before and after, in words.

    Raises:
        RunLockedError: a process writes to the run.
        StoreError: a partition could not be compacted; `say` got the reason.
    """
    manifest, before = read_manifest(folder), _count_shards(folder)
    # The command compacts even if the run's settings switch compaction off.
    given = {"compact": "after_grace"} | ({} if grace_s is None else {"compaction_grace_s": grace_s})
    config = parse_settings(StoreConfig, manifest.config.get("store", {}) | given)
    with OpenRun.extend(folder, config_of=config) as run:
        async with run.writer, Compactor(run.files, run.writer, config, say) as compactor:
            # Steps after the last checkpoint may still be replaced on resume.
            if manifest.status == "finished":
                await compactor.finish()
            else:
                compactor.begin(max(list_complete_checkpoints(folder), default=0))
                await compactor.settle()
    if compactor.n_failed:
        raise StoreError(f"{folder.location}: {compactor.n_failed} partitions were not compacted")
    done = f"{folder.location}: {before} shards before, {_count_shards(folder)} now"
    return done if manifest.status == "finished" else f"{done}; steps after the last checkpoint are unchanged"


def _count_shards(folder: RunFolder) -> int:
    files = open_files(folder)
    return sum(len(files.keys(f"{name}/**/*.arrow")) for name in PARTITION_KEYS)
