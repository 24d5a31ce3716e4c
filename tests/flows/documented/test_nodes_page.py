"""A trainer on two nodes, as the page on checkpoints starts it; both are this machine."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from page_scene import Scene

from rollmill.tasks.processes.launched_process import free_port
from tests.documentation.page_commands import Command, commands_run_by

pytestmark = [pytest.mark.service, pytest.mark.long]
LONGEST_S = 600.0


@pytest.fixture(scope="module")
def scene(open_scene) -> Iterator[Scene]:  # type: ignore[no-untyped-def]
    ports = {"trainer_port": str(free_port()), "meeting_port": str(free_port())}

    def wait_for_trainer(_: Scene, command: Command, printed: str) -> None:
        if "--node 1" in command.text:
            asyncio.run(wait_until_it_answers(f"http://127.0.0.1:{ports['trainer_port']}/v1/health"))

    with open_scene(
        __file__, {"steps": 2}, {"ROLLMILL_TRAINER_TOKEN": "two-nodes"}, wait_for_trainer, **ports
    ) as scene:
        yield scene


async def wait_until_it_answers(url: str) -> None:
    async with asyncio.timeout(LONGEST_S), httpx.AsyncClient(trust_env=False) as client:
        while True:
            try:
                await client.get(url)
            except httpx.TransportError:
                await asyncio.sleep(0.2)
            else:
                return


@pytest.mark.parametrize("command", commands_run_by(__file__), ids=str)
def test_a_documented_command_does_what_it_is_there_for(scene: Scene, command: Command) -> None:
    scene.run(command)
