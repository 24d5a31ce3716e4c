"""What the version of a scorer with arguments is a digest of is shown where its scores are."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import plotly.io
import pytest

from rollmill.flows.configuration.recipe import run_tokenizer
from rollmill.flows.prefect_integration.run_pages import scores_page
from rollmill.tasks.look.tables.scores import explain_scorers
from rollmill.tasks.look.tables.selection import Selection
from rollmill.tasks.look.tables.trajectory_table import make_trajectories_view
from rollmill.tasks.look.terminal.markdown_escape import escape_inline
from rollmill.tasks.look.web.app import render_page
from rollmill.tasks.look.web.run_data import RunData
from rollmill.tasks.score.config import ScoreConfig, WeightedScorer
from rollmill.tasks.score.terms import resolve_terms
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.manifest import read_manifest, write_manifest
from rollmill.tasks.user_code.plug_in import PlugIn

LINE = 'brevity@1 is rewards:brevity {"limit": 50}'


@pytest.fixture
def run(small_run: RunFolder, tmp_path: Path) -> RunFolder:
    """The run, one of whose scorers has arguments."""
    folder = RunFolder(tmp_path / "runs" / "explained")
    shutil.copytree(small_run.local, folder.local)
    before = read_manifest(folder)
    key, _, description = LINE.partition(" is ")
    write_manifest(open_files(folder), replace(before, scorers={key: description}), before)
    return folder


def test_tables_and_pages_say_what_a_version_is_a_digest_of(run: RunFolder) -> None:
    source = RunData(run, 0.0, run_tokenizer)
    selection = Selection(scorer="brevity@1")
    assert explain_scorers(run) == [LINE]
    assert explain_scorers(run, "addition@1") == []
    assert LINE in make_trajectories_view(run, selection).notes
    assert LINE in source.trajectories(selection, "", 0, 5).note
    assert json.dumps(LINE) in plotly.io.json.to_json_plotly(render_page(source, "/compare", ""))
    assert f"- {escape_inline(LINE)}" in scores_page(run)


@pytest.mark.parametrize(
    ("config", "description"),
    [
        (ScoreConfig(scorer=PlugIn(name="exact")), ""),
        (
            ScoreConfig(
                sum=(
                    WeightedScorer(scorer=PlugIn(name="math")),
                    WeightedScorer(scorer=PlugIn(name="exact"), weight=0.1),
                )
            ),
            "1 * math + 0.1 * exact",
        ),
    ],
)
def test_a_version_that_is_a_digest_has_a_description(config: ScoreConfig, description: str) -> None:
    assert resolve_terms(config).description == description
