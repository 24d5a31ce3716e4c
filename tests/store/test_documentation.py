"""docs/datasets.md says what is there."""

from pathlib import Path

import pytest

from tasks.store.schemas import SCHEMAS

PAGE = (Path(__file__).parents[2] / "docs" / "datasets.md").read_text()


@pytest.mark.parametrize("dataset", SCHEMAS)
def test_every_column_is_described_with_its_meaning(dataset: str) -> None:
    section = PAGE.split(f"## {dataset}\n")[1].split("\n## ")[0]
    for field in SCHEMAS[dataset]:
        meaning = field.metadata[b"meaning"].decode().replace("|", "/")
        assert f"| {field.name} |" in section
        assert meaning in section
