"""A connection to the trainer that breaks: what was asked is done once, and whoever asked gets the answer."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any

import pytest

from rollmill.tasks.errors import ServiceDiedError
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.train.service.answers import TrainerHealth
from rollmill.tasks.train.service.commands import Command, DigestState
from rollmill.tasks.train.service.control_api import ControlServer, Operations, build_control_app
from rollmill.tasks.train.service.trainer_client import TrainerClient

SOME_BYTES = 1 << 16


class Break(Enum):
    """What becomes of a connection."""

    BEFORE = "the request gets lost"
    AFTER = "the answer gets lost"
    NEVER = "it stays"


class Trainer:
    """The control API with a command that counts how often it is carried out."""

    def __init__(self) -> None:
        self.port, self.done = free_port(), 0
        app = build_control_app(Operations(), self, "token")
        self._server = ControlServer(app, "127.0.0.1", self.port)

    def stop(self) -> None:
        self._server.stop()

    def health(self) -> TrainerHealth:
        raise NotImplementedError

    def answers_at_once(self, _command: Command[Any]) -> bool:
        return True

    def progress(self, _command: Command[Any]) -> dict[str, int]:
        return {}

    def run(self, _command: Command[Any]) -> dict[str, str]:
        self.done += 1
        return {"weight": "digest"}


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    yield trainer
    trainer.stop()


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until there is no more to read."""
    while some := await reader.read(SOME_BYTES):
        writer.write(some)


@asynccontextmanager
async def client_through(trainer: Trainer, breaks: list[Break]) -> AsyncIterator[TrainerClient]:
    """A client whose first connections break as given; later ones do not break."""
    left = iter(breaks)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        how = next(left, Break.NEVER)
        behind, to_behind = await asyncio.open_connection("127.0.0.1", trainer.port)
        try:
            if how is Break.BEFORE:
                await reader.read(1)
                return
            asked = asyncio.create_task(pass_on(reader, to_behind))
            if how is Break.AFTER:
                await behind.read(1)
            else:
                await pass_on(behind, writer)
            asked.cancel()
        finally:
            to_behind.close()
            writer.close()

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with TrainerClient(f"http://127.0.0.1:{port}", "token", timeout_s=60.0) as client:
            yield client
    assert list(left) == [], "all breaks were met"


@pytest.mark.parametrize("lost", [[Break.BEFORE], [Break.AFTER], [Break.AFTER, Break.BEFORE, Break.AFTER]])
async def test_a_command_that_gets_lost_is_carried_out_once(trainer: Trainer, lost: list[Break]) -> None:
    async with client_through(trainer, lost) as client:
        assert await client.do(DigestState()) == {"weight": "digest"}
        assert await client.do(DigestState()) == {"weight": "digest"}
    assert trainer.done == 2, "the same command asked for again is carried out again"


async def test_a_trainer_that_is_gone_is_reported(trainer: Trainer) -> None:
    trainer.stop()
    async with TrainerClient(f"http://127.0.0.1:{trainer.port}", "token", timeout_s=60.0) as client:
        with pytest.raises(ServiceDiedError, match=f"does not answer at http://127.0.0.1:{trainer.port}"):
            await client.do(DigestState())
