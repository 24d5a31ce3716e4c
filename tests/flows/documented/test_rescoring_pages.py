"""What the pages do with stored rollouts and other rewards, one command after another: rescore, retrain, replay, and compare."""

from collections.abc import Iterator

import pytest
from page_scene import Scene

from tests.documentation.page_commands import ROOT, Command, commands_run_by

pytestmark = [pytest.mark.service, pytest.mark.long]


@pytest.fixture(scope="module")
def scene(open_scene, rewards: str) -> Iterator[Scene]:  # type: ignore[no-untyped-def]
    """A run `quickstart`, and the rewards that the pages name; `rewards.py` is that of rescoring.md."""
    with open_scene(__file__, {"steps": 3, "checkpoint": {"every": 1}}) as scene:
        (scene.folder / "rewards.py").write_text(rewards)
        (scene.folder / "my_rewards.py").write_text(
            "def strict(candidate):\n    return float(candidate.answer == candidate.example['answer'])\n"
        )
        (scene.folder / "benchmarks").symlink_to(ROOT / "benchmarks")
        scene.prepare("rollmill run quickstart")
        yield scene


@pytest.mark.parametrize("command", commands_run_by(__file__), ids=str)
def test_a_documented_command_does_what_it_is_there_for(scene: Scene, command: Command) -> None:
    scene.run(command)
