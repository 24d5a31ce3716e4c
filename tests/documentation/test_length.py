"""The pages that users read stay short. Measurements and mechanisms belong in docs/lab, which is not counted."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
MOST_WORDS = 25_000
MOST_WORDS_OF_THE_README = 1_250
GENERATED_PAGE = "reference/settings.md"
GENERATED_TABLES = re.compile(
    r"^\| (?:column \| type|of each \| check) \|.*?(?=^\n|\Z)", re.MULTILINE | re.DOTALL
)
"""Columns of the data sets, and the checks of `rollmill verify`: made from schemas and docstrings."""


def count_words(text: str) -> int:
    """Words outside of code fences: what is between spaces and has a letter or a digit."""
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return sum(1 for each in GENERATED_TABLES.sub("", prose).split() if re.search(r"\w", each))


def test_words_are_counted_without_code_and_generated_tables() -> None:
    page = "# Two words\n\n```sh\nrollmill run quickstart\n```\n\n| column | type | unit |\n|---|---|---|\n| `a` | int | s |\n\nThree more, `words`.\n"
    assert count_words(page) == 5


def test_the_pages_for_users_are_short() -> None:
    pages = {page.relative_to(DOCS).as_posix(): page for page in DOCS.rglob("*.md")}
    counted = {
        name: count_words(page.read_text())
        for name, page in pages.items()
        if not name.startswith("lab/") and name != GENERATED_PAGE
    }
    longest = sorted(counted.items(), key=lambda item: -item[1])[:10]
    assert sum(counted.values()) <= MOST_WORDS, f"say things once, or move them to docs/lab: {longest}"


def test_the_readme_is_short() -> None:
    assert count_words((DOCS.parent / "README.md").read_text()) <= MOST_WORDS_OF_THE_README
