"""README and docs hold together: links lead somewhere, settings in YAML exist, Python is run by a test."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.settings import parse_settings, settings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
IDS = [page.name for page in PAGES]
LARGEST_PICTURE_BYTES = 200_000
PYTHON_IS_RUN_BY = {
    "sandbox.md": "tests/sandbox/test_refusals.py",
    "README.md": "tests/flows/documented/test_stored_run_pages.py",
    "algorithms.md": "tests/train/test_algorithms_documentation.py",
    "checkpoints.md": "tests/flows/documented/test_stored_run_pages.py",
    "compaction.md": "tests/flows/documented/test_stored_run_pages.py",
    "datasets.md": "tests/looking/test_recipes.py",
    "environments.md": "tests/rollout/test_tools.py",
    "improve.md": "tests/flows/test_improve.py",
    "publish.md": "tests/looking/test_publish.py",
    "queries.md": "tests/looking/test_run_frames.py",
    "rescoring.md": "tests/flows/documented/test_rescoring_pages.py",
    "scorers.md": "tests/score/test_scorers_documentation.py",
    "storage.md": "tests/flows/documented/test_stored_run_pages.py",
    "tutorial.md": "tests/flows/test_product.py",
}


def without_fences(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What headings are called in links, as GitHub makes it."""
    headings = re.findall(r"^#+ (.*)$", without_fences(page.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_link_leads_somewhere(page: Path) -> None:
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_fences(page.read_text())):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            lost.append(target)
    assert lost == []


def test_every_page_is_in_the_index_and_in_the_sites_navigation() -> None:
    docs = ROOT / "docs"
    names = {page.relative_to(docs).as_posix() for page in PAGES if page.is_relative_to(docs)} - {"index.md"}
    linked = re.findall(r"\]\(([^)#]+\.md)\)", (docs / "index.md").read_text())
    assert sorted(linked) == sorted(names)
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted({*names, "index.md"})


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_settings_in_yaml_are_settings(page: Path) -> None:
    for text in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        if re.match(r" *- name:", text):
            continue  # an entry of prefect.yaml: tests/flows/test_product.py deploys it
        values: Any = yaml.safe_load(text)
        if isinstance(values, dict) and values.keys() & RunConfig.model_fields.keys():
            parse_settings(RunConfig, values)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_a_setting_that_is_named_exists(page: Path) -> None:
    known = settings().keys()
    sections = {name.rpartition(".")[0] for name in known} - {""}
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?::[^`]*)?`", without_fences(page.read_text()))
    first = {name.partition(".")[0] for name in sections}
    said = {name for name in named if name.partition(".")[0] in first}
    ignored = {name for name in said if re.search(r"\.(md|py|json|yaml|env|log)$", name)}
    assert sorted(said - ignored - set(known) - sections) == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_on_a_page_is_run_by_a_test(page: Path) -> None:
    if re.search(r"^```python$", page.read_text(), re.MULTILINE):
        test = ROOT / PYTHON_IS_RUN_BY[page.name]
        assert page.stem in test.read_text(), f"{test} does not read {page.name}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_a_file_that_is_named_exists(page: Path) -> None:
    named = re.findall(
        r"`((?:flows|tasks|tests|benchmarks|deploy)/[\w./-]+)`", without_fences(page.read_text())
    )
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_pictures_are_small() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "docs/images/*.png"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    )  # fmt: skip
    sizes = {name: (ROOT / name).stat().st_size for name in listed.stdout.splitlines()}
    assert sizes
    assert {name: size for name, size in sizes.items() if size > LARGEST_PICTURE_BYTES} == {}
