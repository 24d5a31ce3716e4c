"""docs/datasets.md says what is there."""

from pathlib import Path

import pytest

from tasks.store.schemas import SCHEMAS

PAGE = (Path(__file__).parents[2] / "docs" / "datasets.md").read_text()


@pytest.mark.parametrize("dataset", SCHEMAS)
def test_every_column_is_described_with_its_meaning(dataset: str) -> None:
    section = PAGE.split(f"## {dataset}\n")[1].split("\n## ")[0]
    for field in SCHEMAS[dataset]:
        told = [field.metadata.get(key, b"").decode() for key in (b"shape", b"unit", b"meaning")]
        cells = (field.name, str(field.type), *told)
        assert f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |".replace("  ", " ") in section
