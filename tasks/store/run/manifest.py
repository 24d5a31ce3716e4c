"""run.json: id, configuration, status and counters of a run, and the runs whose rollouts it trains on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from rollmill.tasks.config import describe_invalid
from rollmill.tasks.errors import ConfigError, ManifestError, StoreError
from rollmill.tasks.store.filesystem import Files, open_files, read_text
from rollmill.tasks.store.folders import MANIFEST, RunFolder
from rollmill.tasks.store.run.former_settings import StoredSettings
from rollmill.tasks.store.run.step_settings import EarlierSettings, keep_earlier, select_settings
from rollmill.tasks.store.schema_versions import describe_unread


@dataclass(frozen=True, slots=True)
class ForkOrigin:
    """A run that another run was forked from, and the step of that fork.

    Attributes:
        run: id of the original run, which the copied rows keep.
        folder: location of the original run at the time of the fork.
        step: step of the fork: rows of earlier steps are copied from the original run.
        config: resolved configuration of the original run at the fork; empty if not recorded.
    """

    run: str
    folder: str
    step: int
    config: StoredSettings = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingSource:
    """A run whose stored rollouts another run trains on.

    Attributes:
        run: id of the run that stored the rollouts.
        folder: absolute location of that run, as in the column `source` of the data set `batches`.
    """

    run: str
    folder: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of run.json, the file that describes a run: its ids, configuration, status and origins.

    Attributes:
        run: random id; never the folder's name.
        incarnation: counter that rises by one whenever a trainer loads state; 0: no trainer has.
        epoch: counter that rises by one whenever the folder is opened for writing, from 1; part of the name of each shard.
        schema_version: newest one among the shards of the run.
        config: resolved configuration, as it was when the folder was last opened for writing.
        versions: of the packages then in use, by name.
        git_commit: of the checkout then in use; empty outside of one.
        created_at: ISO 8601, UTC.
        status: "forking" until everything that a forked run begins with is copied.
        origins: the runs that it was forked from, oldest first.
        sources: the other runs whose rollouts it trains on; empty for a run that trains on its own alone.
        trains: False for a run of the flow collect, whose steps are done when they have metrics.
        earlier_settings: settings of training that changed, as earlier steps were trained under them, oldest first; later steps
            have those of `config`.
        scorers: what a scorer's version with a digest is a digest of, by NAME@VERSION: the scorers with their arguments.
        scorer: NAME@VERSION of the run's own scorer, as it was when the folder was last opened for sampling; empty: not recorded.
    """

    run: str
    incarnation: int
    epoch: int
    schema_version: int
    config: StoredSettings
    versions: dict[str, str]
    git_commit: str
    created_at: str
    status: Literal["forking", "running", "finished"]
    origins: tuple[ForkOrigin, ...] = ()
    sources: tuple[TrainingSource, ...] = ()
    trains: bool = True
    earlier_settings: tuple[EarlierSettings, ...] = ()
    scorers: dict[str, str] = field(default_factory=dict)
    scorer: str = ""

    @property
    def first_step(self) -> int:
        """First step that is not copied from another run: 0, or the step at which this run was forked."""
        return self.origins[-1].step if self.origins else 0

    def run_at_step(self, step: int) -> str:
        """Return the id of the run that wrote the rows of a step: this run, or one that it was forked from."""
        return next((origin.run for origin in self.origins if step < origin.step), self.run)

    def find_settings(self, step: int, by_step: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that a step is trained under, by dotted name.

        `by_step` has the defaults of these settings, which count for one that is not recorded.
        """
        for each in self.earlier_settings:
            if step < each.until_step:
                return {**by_step, **each.settings}
        copied = (each.config for each in self.origins if step < each.step and each.config)
        return select_settings(next(copied, self.config), by_step)

    def keep_earlier_settings(
        self, n_steps: int, given: Mapping[str, Any] | None, by_step: Mapping[str, Any]
    ) -> tuple[EarlierSettings, ...]:
        """Return the records of the first `n_steps` steps, for later steps with the configuration `given`; None: for a fork."""
        copied = [(each.step, each.config) for each in self.origins if each.config]
        return keep_earlier(
            self.earlier_settings, [*copied, (n_steps, self.config)], None if copied else given, by_step
        )


_ADAPTER = TypeAdapter(Manifest)


def has_manifest(folder: RunFolder) -> bool:
    """Return True if the folder has a run.json."""
    return bool(open_files(folder).keys(MANIFEST))


def read_manifest(folder: RunFolder) -> Manifest:
    """Read a run's manifest.

    Raises:
        ManifestError: it is damaged.
        StoreError: there is none, it cannot be read, or a Rollmill of another schema version wrote it.
    """
    if not has_manifest(folder):
        raise StoreError(f"{folder.location} holds no run: there is no {MANIFEST} in it")
    text = read_text(open_files(folder), MANIFEST)
    try:
        manifest = _ADAPTER.validate_json(text)
    except ValidationError as error:
        raise ManifestError(
            f"{folder.path(MANIFEST)} is damaged: {describe_invalid(error)}; restore it from a copy of the run"
        ) from error
    if fault := describe_unread(manifest.schema_version):
        raise StoreError(f"{folder.path(MANIFEST)} has {fault}")
    return manifest


def write_manifest(files: Files, manifest: Manifest, stored: Manifest | None) -> None:
    """Replace run.json atomically; `files` are opened by the holder of the run's lock.

    `stored` is the content as the caller last read or wrote it; None: there is no run.json.

    Raises:
        LeaseLostError: run.json on S3 is not `stored`: another process has taken the run over.
        StoreError: it could not be written.
    """

    def is_stored(text: bytes | None) -> bool:
        if text is None or stored is None:
            return text is None and stored is None
        try:
            return _manifest_text(_ADAPTER.validate_json(text)) == _manifest_text(stored)
        except ValidationError:
            return False

    files.exchange(MANIFEST, _manifest_text(manifest), is_stored)


def _manifest_text(manifest: Manifest) -> bytes:
    return _ADAPTER.dump_json(manifest, indent=2) + b"\n"


def read_sources(folders: Iterable[RunFolder]) -> tuple[TrainingSource, ...]:
    """Read the ids of the runs in some folders; returns each run's id and folder, as sources of a new run."""
    return tuple(TrainingSource(read_manifest(folder).run, folder.absolute) for folder in folders)


def describe_misplaced(source: TrainingSource) -> str:
    """Describe what a source's folder has instead of that run; empty if the run is there, StoreError if run.json cannot be read."""
    folder = RunFolder(source.folder)
    if not has_manifest(folder):
        return f"expected run {source.run} in {source.folder}, found no run"
    found = read_manifest(folder).run
    return (
        ""
        if found == source.run
        else f"expected run {source.run} in {source.folder}, and run {found} is there"
    )


def check_sources(folder: RunFolder, field: str = "retrain.sources") -> None:
    """Raise ConfigError, which names both ids, unless every run that this run trains on is in its recorded folder; a new run has none."""
    for source in read_manifest(folder).sources if has_manifest(folder) else ():
        if wrong := describe_misplaced(source):
            raise ConfigError(field, source.folder, f"{wrong}; move the source back to its folder")


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
