"""Documentation, sources and tests use the field's words: idioms that readers stumbled over do not come back."""

import re
from pathlib import Path

import pytest

from rollmill.flows.configuration.settings import describe

ROOT = Path(__file__).parents[2]
GENERATED = {"settings.md"}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"] + [
    page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in GENERATED
]
INSTEAD = {
    r"\b(go(es)?|going|gone|went) on\b": "resume, continue",
    r"\b(told|tells)\b": "report, record, log",
    r"\b(lies?|lay) (in|on|at|below|under|there)\b": "is stored, is",
    r"\b(stands?|stood) (in|at|on|by|for|there|still|above|below|next)\b": "is, is blocked, means",
    r"\banew\b": "again",
    r"go(es)? by\b": "use",
    r"of (its|their) own": "separate, dedicated",
    r"beside (the|each|steps|training|scoring|them|others|other)": "concurrently, in the background, next to",
    r"hand(s|ed)? over|taken? in\b": "stage, ingest",
    r"set aside": "remove from the pool",
    r"vouch|distrust": "verify, reject",
    r"by half": "50 %",
}
"""Pattern of an idiom, and the words to use instead; AGENTS.md lists them too."""


def find_idioms(text: str) -> list[str]:
    """What to write instead, for each idiom in a text."""
    found = [
        (match[0], words) for idiom, words in INSTEAD.items() for match in re.finditer(idiom, text, re.I)
    ]
    return [f"{idiom!r}: write {words}" for idiom, words in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_no_idiom(page: Path) -> None:
    assert find_idioms(re.sub(r"\s+", " ", page.read_text())) == []


def test_the_text_of_a_setting_has_no_idiom() -> None:
    texts = {line.partition(" = ")[0]: find_idioms(line) for line in describe()}
    assert {name: found for name, found in texts.items() if found} == {}


def test_an_idiom_is_found() -> None:
    assert find_idioms("A run is gone on with by the same command.") == ["'gone on': write resume, continue"]


SOURCES = sorted(
    path
    for folder in ("flows", "tasks", "conf", "deploy", "benchmarks", "tests")
    for suffix in ("py", "js", "yaml")
    for path in (ROOT / folder).rglob(f"*.{suffix}")
    if path != Path(__file__).resolve()  # which lists the idioms
) + [ROOT / name for name in ("prefect.yaml", "compose.yaml", "Makefile", "Dockerfile")]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_source_file_has_no_idiom(path: Path) -> None:
    """Names, docstrings, comments, log lines and errors, also where a line break is within the idiom."""
    assert find_idioms(re.sub(r'\s*"\s*f?"|[\s"#_]+', " ", path.read_text())) == []
