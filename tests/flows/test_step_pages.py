"""Where a step's time went, on its page in Prefect and on the run's: a whole run, over a trainer and a server that are stubs."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import patient
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from rollmill.flows.post_train import post_train
from rollmill.tasks.look.ledger.run_ledger import read_ledger
from rollmill.tasks.look.tables.cost_view import make_costs_view
from rollmill.tasks.look.tables.ledger_tables import PATH, make_ledger_views
from rollmill.tasks.look.tables.selection import Interval
from rollmill.tasks.look.tables.view import View
from rollmill.tasks.look.terminal.markdown_escape import make_table
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.rollout.chat_tokenizer import save_character_tokenizer
from rollmill.tasks.store.folders import RunFolder
from tests.stubs.toy_settings import validate_toy
from tests.stubs.trainer import StubTrainer
from tests.stubs.vllm_server import StubVllmServer

pytestmark = pytest.mark.service

STEPS = 3


@contextmanager
def stubs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A trainer and a server that take 50 ms each; the settings that name them."""
    model = save_character_tokenizer(folder / "model")
    (model / "config.json").write_text("{}")
    trainer = StubTrainer(0.05, 0.05)
    monkeypatch.setenv("ROLLMILL_TRAINER_TOKEN", trainer.token)
    ports = free_port(), free_port()
    controls = [StubVllmServer(model, 0.05).serve(ports[0]), trainer.serve(ports[1])]
    server, control = (f"http://127.0.0.1:{port}" for port in ports)
    try:
        yield {"model": str(model), "serve": {"urls": [server]}, "train": {"url": control}}
    finally:
        for each in controls:
            each.stop()


@pytest.fixture(name="run")
def _run(prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run that is over."""
    with stubs(tmp_path, monkeypatch) as settings, temporary_settings({PREFECT_API_URL: prefect_api}):
        rollout = {"groups_per_step": 2, "group_size": 2}
        others = {"evaluate": {"every": 0}, "store": {"root": str(tmp_path / "runs")}}
        config = validate_toy({"steps": STEPS, "rollout": rollout} | others | settings)
        return RunFolder(asyncio.run(post_train("paged", config)))


def pages(api: str, key: str) -> list[str]:
    """All versions of an artifact, in the order in which they were made."""
    body = {"artifacts": {"key": {"any_": [key]}}}
    found = patient.post(f"{api}/artifacts/filter", json=body).raise_for_status().json()
    return [str(each["data"]) for each in sorted(found, key=lambda each: str(each["created"]))]


def plain(markdown: str) -> list[str]:
    """Lines as they are read."""
    return [re.sub(r"\\(\W|_)", r"\1", line).strip("*") for line in markdown.splitlines()]


def has(page: str, views: list[View]) -> None:
    """A page has all that the command prints, but for the critical path's segments."""
    lines = plain(page)
    for view in views:
        if view.rows and view.title != PATH:
            at = lines.index(view.title)
            shown = [plain(line)[0] for line in make_table(view)]
            assert lines[at + 2 : at + 2 + len(shown)] == shown
            assert set(view.notes) <= set(lines)


def test_a_steps_page_and_the_runs_have_the_tables_of_rollmill_spans(
    prefect_api: str, run: RunFolder
) -> None:
    shown = pages(prefect_api, "paged-step")
    assert len(shown) == STEPS
    for step, page in enumerate(shown):
        has(page, make_ledger_views(run.name, read_ledger(run, Interval(step, step))))
    (page,) = pages(prefect_api, "paged")
    printed = make_ledger_views(run.name, read_ledger(run))
    assert "its start and end" in printed[-1].title
    has(page, [*printed[:-1], make_costs_view(run, read_ledger(run))])
