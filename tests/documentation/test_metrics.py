"""Every metric has its name in the documentation."""

import ast
import re
from pathlib import Path

from rollmill.flows.policies.sync_report import sync_metrics
from rollmill.tasks.serve.server_pool import ServerPool
from rollmill.tasks.train.service.rank_timeline import PHASES

ROOT = Path(__file__).parents[2]
STAGES = "rollout|score|serve|sync|train|retrain|time|drops|submit|loop|memory|observe|store"
METRIC = re.compile(rf"(?:{STAGES})/[a-z0-9_]*[a-z0-9]")
DOCS = "".join(page.read_text() for page in sorted((ROOT / "docs").rglob("*.md")))


def metric_names() -> set[str]:
    """The names that are whole literals in the code, and those of servers and syncs."""
    found = {each.name for each in (*ServerPool().metrics(), *sync_metrics([], 0))}
    for path in (path for folder in ("flows", "tasks") for path in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text())
        parts = {
            id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
        }
        found |= {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in parts
            and METRIC.fullmatch(node.value)
        }
    return found


def test_every_metric_is_on_a_page() -> None:
    """By its whole name, or in the table of token metrics without `train/`."""
    names = metric_names()
    assert {"serve/removals", "sync/logprob_difference_at_start", "train/loss", "time/step_s"} <= names
    assert [
        name
        for name in sorted(names)
        if f"`{name}`" not in DOCS and f"`{name.removeprefix('train/')}`" not in DOCS
    ] == []


def test_every_phase_of_a_rank_is_on_the_page_of_spans() -> None:
    page = (ROOT / "docs" / "reference" / "spans.md").read_text()
    assert [phase for phase in PHASES if f"`{phase}`" not in page] == []
