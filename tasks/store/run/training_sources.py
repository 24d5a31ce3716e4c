"""The runs whose rollouts another run trains on, recorded by folder and id."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rollmill.tasks.errors import ConfigError, StoreError
from rollmill.tasks.store.folders import MANIFEST, RunFolder
from rollmill.tasks.store.run.manifest import TrainingSource, has_manifest, read_manifest


def read_sources(folders: Iterable[RunFolder]) -> tuple[TrainingSource, ...]:
    """Read the ids of the runs in some folders; returns each run's id and folder, as sources of a new run."""
    return tuple(TrainingSource(read_manifest(folder).run, folder.absolute) for folder in folders)


def describe_misplaced(source: TrainingSource) -> str:
    """Describe what a source's recorded folder has instead of that run, as text; empty if the run is there.

    Raises:
        StoreError: the run.json there cannot be read.
    """
    folder = RunFolder(source.folder)
    if not has_manifest(folder):
        return f"expected run {source.run} in {source.folder}, found no run"
    found = read_manifest(folder).run
    return (
        ""
        if found == source.run
        else f"expected run {source.run} in {source.folder}, and run {found} is there"
    )


def check_sources(folder: RunFolder) -> None:
    """Raise ConfigError unless every run that this run trains on is in its recorded folder; a new run has none.

    Raises:
        ConfigError: names the source's id, and that of the run in its folder.
    """
    for source in read_manifest(folder).sources if has_manifest(folder) else ():
        if wrong := describe_misplaced(source):
            raise ConfigError(
                "retrain.sources", source.folder, f"{wrong}; move the source back to its folder"
            )


def list_dependents(folder: RunFolder) -> Sequence[str]:
    """List the folder names of the runs in the same local root that train on rollouts of the run in `folder`."""
    run, found = read_manifest(folder).run, []
    for path in sorted(Path(folder.absolute).parent.glob(f"*/{MANIFEST}")):
        try:
            sources = read_manifest(RunFolder(path.parent)).sources
        except StoreError:
            # A run with a damaged run.json cannot be opened anyway.
            continue
        if any(source.run == run and source.folder == folder.absolute for source in sources):
            found.append(path.parent.name)
    return found
