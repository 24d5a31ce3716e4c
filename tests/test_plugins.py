"""Names that installed distributions register as entry points work as registered names and import paths do."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rollmill.tasks.config import find_plugins
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment import make_environment
from rollmill.tasks.score.advantages import resolve_advantage
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.terms import resolve_terms
from rollmill.tasks.user_code.plug_in import PlugIn

MODULE = """
from rollmill.tasks.rollout.environments.addition import Addition

class Sums(Addition):
    name = "sums"

def brevity(candidate):
    return 1.0 / len(candidate.answer)

def halves(rewards):
    return rewards / 2.0

def plain(tokens):
    from rollmill.tasks.train.objective.losses.reinforce import reinforce

    return reinforce(tokens)
"""
ENTRY_POINTS = """
[rollmill.environments]
sums = plugin_of_a_test:Sums
[rollmill.scorers]
brevity = plugin_of_a_test:brevity
exact = plugin_of_a_test:brevity
[rollmill.advantages]
halves = plugin_of_a_test:halves
[rollmill.losses]
plain = plugin_of_a_test:plain
"""
SCRIPT = """
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.objective.objective import build_loss
from rollmill.tasks.user_code.plug_in import PlugIn
print(build_loss(TrainConfig(loss="plain"))[0].func.__name__)
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an installed distribution with a plug-in of each kind."""
    (tmp_path / "plugin_of_a_test.py").write_text(MODULE)
    information = tmp_path / "plugin_of_a_test-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-of-a-test\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    find_plugins.cache_clear()
    yield tmp_path
    find_plugins.cache_clear()


def test_an_environment_is_found_by_its_registered_name(plugin: Path) -> None:
    assert make_environment(RolloutConfig(environment="sums")).name == "sums"


def test_a_scorer_is_found_and_has_the_name_of_its_import_path(plugin: Path) -> None:
    assert resolve_terms(ScoreConfig(scorer="brevity")).name == "plugin_of_a_test.brevity"


def test_a_plugin_does_not_replace_what_comes_with_rollmill(plugin: Path) -> None:
    assert resolve_terms(ScoreConfig(scorer="exact")).name == "exact"


def test_an_advantage_is_found_by_its_registered_name(plugin: Path) -> None:
    assert resolve_advantage(PlugIn(name="halves")).of_group(np.array([1.0, 3.0])).tolist() == [0.5, 1.5]


@pytest.mark.slow
def test_a_loss_is_found_by_its_registered_name(plugin: Path) -> None:
    command = [sys.executable, "-c", SCRIPT]
    shown = subprocess.run(
        command, env={"PYTHONPATH": str(plugin)}, capture_output=True, check=False, text=True
    )
    assert shown.stdout.splitlines()[-1:] == ["plain"], shown.stderr


def test_an_unknown_name_is_refused_with_those_of_plugins(plugin: Path) -> None:
    with pytest.raises(ConfigError, match=r"brevity.*did you mean brevity"):
        resolve_terms(ScoreConfig(scorer="brevty"))
    with pytest.raises(ConfigError, match=r"halves.*did you mean halves"):
        resolve_advantage(PlugIn(name="halvs"))
