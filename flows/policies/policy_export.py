"""A stored policy version as a Hugging Face folder, without a trainer."""

import asyncio
import shutil
import tempfile
from pathlib import Path

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.recipe import start_model_folder
from rollmill.flows.configuration.settings import validate
from rollmill.flows.run.trainer_program import run_trainer_program
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.store.checkpoints.checkpoint_store import copy_checkpoint
from rollmill.tasks.store.filesystem import publish_path
from rollmill.tasks.store.folders import RunFolder, checkpoint_key
from rollmill.tasks.store.lineage.lineage_writer import write_lineage
from rollmill.tasks.store.lineage.policy_lineage import CARD, LINEAGE
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.store.run.resume import list_complete_checkpoints

PROGRAM = "rollmill.tasks.train.checkpoints.hf_export"


async def export_policy(
    config: RunConfig,
    model: Path,
    folder: RunFolder,
    run: str,
    version: int,
    output: Path,
    log: Path,
    *,
    has_lineage: bool = False,
) -> None:
    """Write a policy version as a Hugging Face folder, in a separate process.

    Args:
        config: all settings of the run.
        model: folder of the start model, whose tokenizer is copied.
        folder: of the run.
        run: id of the run.
        version: policy version with a checkpoint.
        output: the new folder.
        log: file for the process's output.
        has_lineage: True to write lineage.json and a model card too, for which the rows of the run are read.

    Raises:
        StoreError: the checkpoint cannot be read.
        TrainError: the export failed; has the last lines of the log.
    """
    # A checkpoint on S3 is copied to the disk of `output`: both are as large as a model.
    parent = output.parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as scratch:
        location = folder.path(checkpoint_key(version))
        checkpoint = await asyncio.to_thread(copy_checkpoint, location, Path(scratch))
        await run_trainer_program(
            f"export of version {version}",
            PROGRAM,
            {
                "train": config.train.model_dump(mode="json"),
                "model": str(model),
                "run": run,
                "version": version,
                "checkpoint": str(checkpoint),
                "output": str(output),
                "folder": folder.location if has_lineage else "",
            },
            log=log,
            timeout_s=config.train.command_timeout_s,
            timeout_setting="train.command_timeout_s",
        )


def export_policy_here(folder: RunFolder, version: int | None, output: Path) -> str:
    """Write a policy version of a run as a Hugging Face folder; returns a sentence with the version and the folder.

    Args:
        folder: of the run.
        version: policy version, 0 for the start model; None: the last one with a checkpoint.
        output: the new folder.

    Raises:
        ConfigError: the version has no checkpoint, the start model is missing, or `output` exists.
        StoreError, TrainError: as `export_policy`.
    """
    complete = list_complete_checkpoints(folder)
    chosen = max(complete, default=None) if version is None else version
    if chosen is None or chosen not in (0, *complete):
        there_are = ", ".join(map(str, complete)) or "no version"
        remedy = f"{folder.location} has checkpoints of {there_are}; give one of them, or 0, the start model"
        raise ConfigError("--version", version, remedy)
    if output.exists():
        raise ConfigError("FOLDER", str(output), "it exists already; give the path of a new folder")
    manifest = read_manifest(folder)
    config = validate(manifest.config)
    model = start_model_folder(config)
    if not (model / "config.json").is_file():
        raise ConfigError("model", str(model), "the run's start model is missing; restore its folder")
    if chosen not in complete:
        _copy_start_model(folder, model, output)
        return f"version 0 of {folder.location}, its start model, is in {output}"
    with tempfile.TemporaryDirectory() as logs:
        log = Path(logs) / "export.log"
        asyncio.run(export_policy(config, model, folder, manifest.run, chosen, output, log, has_lineage=True))
    return f"version {chosen} of {folder.location} is in {output}"


def _copy_start_model(folder: RunFolder, model: Path, output: Path) -> None:
    """Copy a run's start model, and write its lineage and model card: those of an exported policy are replaced."""
    with publish_path(output) as staged:
        shutil.copytree(model, staged, ignore=shutil.ignore_patterns(LINEAGE, CARD, ".*"))
        write_lineage(staged, folder, 0, model)
