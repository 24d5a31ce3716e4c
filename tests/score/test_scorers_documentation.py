"""docs/how-to/scorers.md is true: its examples run, and every registered scorer and setting is there."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml

from rollmill.tasks.score.advantages import resolve_advantage
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.scoring import Scoring
from rollmill.tasks.score.terms import SCORERS
from rollmill.tasks.store.rows import Rows, column_values
from rollmill.tasks.user_code.plug_in import PlugIn

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "scorers.md").read_text()
MODULE = "documented_rewards"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def documented(tmp_path: Path) -> Iterator[None]:
    """The page's Python as one module."""
    (tmp_path / f"{MODULE}.py").write_text("\n\n".join(blocks("python")))
    sys.path.insert(0, str(tmp_path))
    yield
    sys.path.remove(str(tmp_path))
    sys.modules.pop(MODULE, None)


async def test_the_pages_rewards_of_turns_and_its_function_of_positions(
    rollouts: Callable[[Sequence[str]], Rows],
) -> None:
    async with Scoring(ScoreConfig(scorer=f"{MODULE}:tests_passed"), "r") as scoring:
        scores = await scoring.score(rollouts(["3 tests passed"]), step=0)
    assert column_values(scores, "turn_rewards") == [[1.0]]
    function = resolve_advantage(PlugIn(name=f"{MODULE}:TO_GO")).by_position
    assert function is not None
    found = function(np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([[True, False], [True, True]]))
    assert found[0, 0] == pytest.approx(-1 / 3)


async def test_the_functions_of_the_page_are_scorers(rollouts: Callable[[Sequence[str]], Rows]) -> None:
    async with Scoring(ScoreConfig(scorer=f"{MODULE}:concise"), "r") as scoring:
        scores = await scoring.score(rollouts(["2", "3"]), step=0)
    assert column_values(scores, "reward") == [1.1, 0.1]


async def test_the_groups_scorer_of_the_page_scores_drops_and_drops_the_group(
    rollouts: Callable[[Sequence[str]], Rows],
) -> None:
    async with Scoring(ScoreConfig(scorer=f"{MODULE}:shortest_right"), "r") as scoring:
        scores = await scoring.score(rollouts(["2", "3", ""]), step=0)
        none_right = await scoring.score(rollouts(["3"]), step=0)
    assert column_values(scores, "status") == ["scored", "scored", "dropped"]
    assert column_values(scores, "subgroup") == [1, 1, 0]
    assert column_values(none_right, "error") == ["nobody was right"]


def test_the_advantage_of_the_page_is_one() -> None:
    assert resolve_advantage(PlugIn(name=f"{MODULE}:ranks")).of_group(np.array([5.0, 1.0, 9.0])).tolist() == [
        0.0,
        -1.0,
        1.0,
    ]
    assert resolve_advantage(PlugIn(name=f"{MODULE}:ranks")).of_group(np.array([1.0, 0.0, 1.0])).tolist() == [
        0.5,
        -1.0,
        0.5,
    ]


@pytest.mark.parametrize("text", blocks("yaml"))
def test_the_settings_of_the_page_are_settings(text: str) -> None:
    ScoreConfig.model_validate(yaml.safe_load(text)["score"])


@pytest.mark.parametrize("name", SCORERS)
def test_every_registered_scorer_is_on_the_page(name: str) -> None:
    assert f"| `{name}`" in PAGE or f", `{name}`" in PAGE
