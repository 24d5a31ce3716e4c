"""The page on distillation, one command after another: a teacher, a student, and both from stored rollouts."""

from collections.abc import Iterator

import pytest
from page_scene import Scene

from tests.documentation.page_commands import Command, commands_run_by

pytestmark = [pytest.mark.service, pytest.mark.long]


@pytest.fixture(scope="module")
def scene(open_scene) -> Iterator[Scene]:  # type: ignore[no-untyped-def]
    with open_scene(__file__, {"steps": 2}) as scene:
        yield scene


@pytest.mark.parametrize("command", commands_run_by(__file__), ids=str)
def test_a_documented_command_does_what_it_is_there_for(scene: Scene, command: Command) -> None:
    scene.run(command)
