"""A run's folder before it is opened: where it lies, whether it can be gone on with, out of the way when it is done."""

from pathlib import Path

from flows.config import RunConfig, fixed_settings
from tasks.errors import RunFinishedError
from tasks.store.fixed import check_fixed
from tasks.store.layout import RunFolder
from tasks.store.manifest import has_manifest, read_manifest


def run_folder(name: str, config: RunConfig) -> RunFolder:
    """Where a run lies."""
    return RunFolder(Path(config.store.root) / name)


def check_resumable(folder: RunFolder, config: RunConfig) -> None:
    """Refuse to go on with a run that is finished, or under settings that would make another run of it.

    Raises:
        RunFinishedError: all its steps are done.
        RunMismatchError: names every setting that differs, and both its values.
    """
    if not has_manifest(folder):
        return
    manifest = read_manifest(folder)
    check_fixed(str(folder.root), manifest.config, config.model_dump(mode="json"), fixed_settings())
    if manifest.status == "finished" and manifest.config["steps"] >= config.steps:
        raise RunFinishedError(
            f"{folder.root} has done all its {manifest.config['steps']} steps; raise steps to go on with it, "
            "or add --again to move it aside and start anew"
        )


def move_finished_aside(folder: RunFolder) -> None:
    """Rename a finished run to NAME-N, with the first N that is free; an unfinished one stays."""
    if not has_manifest(folder) or read_manifest(folder).status != "finished":
        return
    n = 1
    while (moved := folder.root.with_name(f"{folder.root.name}-{n}")).exists():
        n += 1
    folder.root.rename(moved)
