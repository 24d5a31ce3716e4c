"""docs/reference/datasets.md and docs/reference/integrity.md say what is there."""

from inspect import getdoc
from pathlib import Path

import pytest

from rollmill.tasks.errors import SchemaError
from rollmill.tasks.look.export.dataset_docs import insert_tables
from rollmill.tasks.store.verify.run_verification import RUN_CHECKS, SHARD_CHECKS, STEP_CHECKS, VERSION_CHECKS
from rollmill.tasks.train.settings_verification import find_wrong_settings

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "datasets.md").read_text()


def test_every_column_is_described_as_its_schema_is() -> None:
    assert insert_tables(PAGE) == PAGE, "run `python -m rollmill.tasks.look.export.dataset_docs`"


def test_a_data_set_without_a_section_is_named() -> None:
    with pytest.raises(SchemaError, match="'## groups'"):
        insert_tables(PAGE.replace("## groups\n", "## companies\n"))


def test_the_checks_of_verify_are_described_as_their_docstrings_are() -> None:
    listed = {
        "file": SHARD_CHECKS,
        "run": [*RUN_CHECKS, find_wrong_settings],
        "policy version": VERSION_CHECKS,
        "step": STEP_CHECKS,
    }
    table = ["| of each | check | finds |", "|---|---|---|"]
    for read, checks in listed.items():
        for check in checks:
            said = " ".join((getdoc(check) or "").partition("\n\nRaises:")[0].split()).removeprefix("Find ")
            table.append(f"| {read} | `{check.__name__}` | {said.removesuffix('.')} |")
    assert "\n".join(table) in (DOCS / "reference" / "integrity.md").read_text(), (
        "docs/reference/integrity.md: " + "\n".join(table)
    )
