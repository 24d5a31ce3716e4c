"""docs/datasets.md says what is there."""

from pathlib import Path

import pytest

from tasks.errors import SchemaError
from tasks.store.documentation import with_tables

PAGE = (Path(__file__).parents[2] / "docs" / "datasets.md").read_text()


def test_every_column_is_described_as_its_schema_is() -> None:
    assert with_tables(PAGE) == PAGE, "run `python -m tasks.store.documentation`"


def test_a_data_set_without_a_section_is_named() -> None:
    with pytest.raises(SchemaError, match="'## groups'"):
        with_tables(PAGE.replace("## groups\n", "## companies\n"))
