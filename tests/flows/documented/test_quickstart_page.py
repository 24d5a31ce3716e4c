"""The quickstart and its variants, one command after another, with a start model of seconds; `make` takes the set-up as done."""

from collections.abc import Iterator

import pytest
from page_scene import TOOLS, Scene

from tests.documentation.page_commands import ROOT, Command, commands_run_by

pytestmark = [pytest.mark.service, pytest.mark.long]


@pytest.fixture(scope="module")
def scene(open_scene) -> Iterator[Scene]:  # type: ignore[no-untyped-def]
    with open_scene(__file__, {"steps": 2}) as scene:
        (scene.folder / "Makefile").symlink_to(ROOT / "Makefile")
        yield scene


@pytest.mark.parametrize("command", commands_run_by(__file__), ids=str)
def test_a_documented_command_does_what_it_is_there_for(scene: Scene, command: Command) -> None:
    printed = scene.run(command).output
    if command.text.startswith("export PATH"):
        assert printed.strip() == str(scene.folder / ".venv" / "bin" / "rollmill"), TOOLS
