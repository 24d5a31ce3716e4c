"""The note of flow runs serves the UI alone: it never stops a run."""

from pathlib import Path
from uuid import UUID, uuid4

import pytest

from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.flow_runs import MAX_KEPT, read_flow_runs, write_flow_runs


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / ".tmp").mkdir()
    return RunFolder(tmp_path)


def test_written_bytes_are_read_back(folder: RunFolder) -> None:
    assert read_flow_runs(folder) == []
    ids = [uuid4(), uuid4()]
    write_flow_runs(open_files(folder), ids)
    assert read_flow_runs(folder) == ids


def test_the_latest_are_kept(folder: RunFolder) -> None:
    ids = [UUID(int=number) for number in range(MAX_KEPT + 5)]
    write_flow_runs(open_files(folder), ids)
    assert read_flow_runs(folder) == ids[5:]


@pytest.mark.parametrize("text", ["", "[]", '{"flow_runs": 3}', '{"flow_runs": ["no id"]}'])
def test_a_damaged_note_is_an_empty_one(folder: RunFolder, text: str) -> None:
    (folder.local / "flow_runs.json").write_text(text)
    assert read_flow_runs(folder) == []
