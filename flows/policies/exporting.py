"""What `rollmill export-policy` does: a stored version as a Hugging Face folder, without a trainer."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from flows.config import RunConfig
from flows.recipe import start_model_folder
from flows.settings import validate
from tasks.errors import ConfigError, TrainError
from tasks.store.checkpoints import copy_checkpoint
from tasks.store.layout import RunFolder, checkpoint_key
from tasks.store.manifest import read_manifest
from tasks.store.resume import complete_checkpoints

MODULE = "tasks.train.export_checkpoint"
"""Run in a process of its own, since it needs torch; what it reads is its ExportConfig."""


def export_policy_here(folder: RunFolder, version: int | None, output: Path) -> str:
    """Write a version of a run's policy, by default the last that has a checkpoint; returns what was done, in words.

    Raises:
        ConfigError: there is no such checkpoint, no start model, or something lies at `output` already.
        StoreError: the checkpoint cannot be read.
        TrainError: it could not be exported; with the last lines of what was said.
    """
    complete = complete_checkpoints(folder)
    chosen = max(complete, default=None) if version is None else version
    if chosen is None or chosen not in complete:
        there_are = ", ".join(map(str, complete)) or "no version"
        raise ConfigError(
            "--version", version, f"{folder.location} has checkpoints of {there_are}; give one of them"
        )
    if output.exists():
        raise ConfigError("FOLDER", str(output), "it is there already; give the path of a new folder")
    manifest = read_manifest(folder)
    config = validate(manifest.config)
    model = start_model_folder(config)
    if not (model / "config.json").is_file():
        raise ConfigError("model", str(model), "the run's start model is not there any more; bring it back")
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = copy_checkpoint(folder.path(checkpoint_key(chosen)), Path(scratch))
        _export(export_settings(config, model, manifest.run, chosen, checkpoint, output))
    return f"version {chosen} of {folder.location} is in {output}"


def export_settings(
    config: RunConfig, model: Path, run: str, version: int, checkpoint: Path, output: Path
) -> dict[str, object]:
    """What MODULE reads: see its ExportConfig."""
    return {
        "train": config.train.model_dump(mode="json"),
        "model": str(model),
        "run": run,
        "version": version,
        "checkpoint": str(checkpoint),
        "output": str(output),
    }


def _export(told: dict[str, object]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        settings = Path(scratch) / "config.json"
        settings.write_text(json.dumps(told))
        words = [sys.executable, "-m", MODULE, str(settings)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise TrainError(f"export of {told['checkpoint']}: {done.stderr.strip()[-2000:]}")
