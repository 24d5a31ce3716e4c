"""The runs whose rollouts another trains on: found by their place, and told from others by their ids."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tasks.errors import ConfigError, StoreError
from tasks.store.layout import MANIFEST, RunFolder
from tasks.store.manifest import Source, has_manifest, read_manifest


def sources_of(folders: Iterable[RunFolder]) -> tuple[Source, ...]:
    """The runs that lie in these folders now."""
    return tuple(Source(read_manifest(folder).run, folder.absolute) for folder in folders)


def misplaced(source: Source) -> str:
    """What lies in a source's place instead of it, in words; empty when it does itself.

    Raises:
        StoreError: the run.json there cannot be read.
    """
    folder = RunFolder(source.folder)
    if not has_manifest(folder):
        return f"expected run {source.run} in {source.folder}, and there is no run"
    found = read_manifest(folder).run
    return (
        ""
        if found == source.run
        else f"expected run {source.run} in {source.folder}, and run {found} is there"
    )


def check_sources(folder: RunFolder) -> None:
    """Refuse to go on with a run whose sources do not lie where they did; one that is not there yet has none.

    Raises:
        ConfigError: names the source's id, and that of the run that lies there.
    """
    for source in read_manifest(folder).sources if has_manifest(folder) else ():
        if wrong := misplaced(source):
            raise ConfigError(
                "retrain.sources", source.folder, f"{wrong}; bring the source back to where it lay"
            )


def trained_from(folder: RunFolder) -> Sequence[str]:
    """Names of the runs beside this one, on a local disk, that were trained from it."""
    run, found = read_manifest(folder).run, []
    for path in sorted(Path(folder.absolute).parent.glob(f"*/{MANIFEST}")):
        try:
            sources = read_manifest(RunFolder(path.parent)).sources
        except StoreError:
            continue  # whose run.json is damaged can be opened by nobody
        if any(source.run == run and source.folder == folder.absolute for source in sources):
            found.append(path.parent.name)
    return found
