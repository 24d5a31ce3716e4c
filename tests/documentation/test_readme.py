"""The first page: its example is an environment and a reward that work, and it is short."""

import re
from pathlib import Path
from typing import Any

import pytest

from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment import make_environment
from rollmill.tasks.rollout.environment_calls import check_environment
from rollmill.tasks.score.scorer import Candidate

README = (Path(__file__).parents[2] / "README.md").read_text()
EXAMPLE = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)[0]


def test_the_example_has_problems_that_its_reward_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "doubling.py").write_text(EXAMPLE)
    monkeypatch.syspath_prepend(tmp_path)
    config = RolloutConfig(environment="doubling:Doubling")
    check_environment(make_environment(config), config)
    names: dict[str, Any] = {}
    exec(EXAMPLE, names)
    example = {"problem": "2*21=", "answer": "42"}
    said = [{"role": "user", "content": "2*21="}, {"role": "assistant", "content": "42 "}]
    assert names["right"](Candidate("t", example, said, is_complete=True)) == 1.0
    assert names["right"](Candidate("t", example | {"answer": "41"}, said, is_complete=True)) == 0.0


async def test_no_problem_of_the_example_is_in_both_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, Any] = {}
    exec(EXAMPLE, names)
    environment = names["Doubling"]()
    trained, held_out = [
        {(await environment.example(split, index)).example_id for index in range(environment.size(split))}
        for split in ("train", "held_out")
    ]
    assert (len(trained), len(held_out), trained & held_out) == (900, 100, set())
