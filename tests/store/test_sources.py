"""A source is identified by its run id."""

from dataclasses import replace
from pathlib import Path

import pytest

from rollmill.flows.run.folder import check_movable
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.manifest import check_sources, read_manifest, read_sources, write_manifest
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.verify.run_verification import verify_run


def begin(folder: Path) -> RunFolder:
    """Begin an empty run."""
    run = RunFolder(folder)
    OpenRun.open(run, config={}, fixed={}, versions={}, git_commit="", config_of=StoreConfig()).close()
    return run


@pytest.fixture
def source(tmp_path: Path) -> RunFolder:
    return begin(tmp_path / "source")


@pytest.fixture
def retrained(tmp_path: Path, source: RunFolder) -> RunFolder:
    """A run that is trained from the source."""
    folder = begin(tmp_path / "retrained")
    with OpenRun.extend(folder, config_of=StoreConfig()) as run:
        run.keep_sources(read_sources([source]))
    return folder


def test_a_source_that_was_moved_is_refused_and_found_by_verify(
    source: RunFolder, retrained: RunFolder
) -> None:
    check_sources(retrained)
    id_of_source = read_manifest(source).run
    source.local.rename(source.local.with_name("source-1"))

    with pytest.raises(ConfigError, match=f"expected run {id_of_source} .* found no run"):
        check_sources(retrained)
    assert any(id_of_source in each.what for each in verify_run(retrained).findings)


def test_another_run_in_the_place_of_a_source_is_refused_with_both_ids(
    source: RunFolder, retrained: RunFolder
) -> None:
    manifest = read_manifest(source)
    write_manifest(open_files(source), replace(manifest, run="other"), manifest)

    with pytest.raises(ConfigError, match=f"expected run {manifest.run} .* run other is there"):
        check_sources(retrained)


def test_the_sources_of_a_run_stay_and_those_of_a_fork_are_added(
    retrained: RunFolder, tmp_path: Path
) -> None:
    before, other = read_manifest(retrained).sources, begin(tmp_path / "other")
    with OpenRun.extend(retrained, config_of=StoreConfig()) as run:
        run.keep_sources(())
        assert read_manifest(retrained).sources == before
        for _ in range(2):
            run.keep_sources(read_sources([other]))
    assert read_manifest(retrained).sources == (*before, *read_sources([other]))


def test_a_run_that_another_was_trained_from_is_not_moved_aside(
    source: RunFolder, retrained: RunFolder
) -> None:
    check_movable(retrained)
    with pytest.raises(ConfigError, match="retrained was trained from it"):
        check_movable(source)
