"""A worker process of an environment: `python -m tasks.rollout.env_worker CONFIG.json SOCKET`.

CONFIG.json is a RolloutConfig; SOCKET lies in a folder of its own. What the worker answers is in env_messages. It ends at SIGTERM.
"""

import asyncio
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from aiohttp import web

from tasks.errors import ConfigError
from tasks.rollout.config import RolloutConfig
from tasks.rollout.env_messages import (
    CloseAnswer,
    Description,
    ExampleAnswer,
    ExampleRequest,
    Raised,
    Turn,
    TurnAnswer,
)
from tasks.rollout.environment import Environment, Episode, environment_of

MOST_BODY_BYTES = 1 << 30
BACKLOG = 4096
"""Connections that may wait to be accepted; at a unix socket one more is an error, not a wait."""

_to_turn = msgspec.json.Decoder(Turn).decode
_to_example_request = msgspec.json.Decoder(ExampleRequest).decode


def main() -> None:
    """Serve until SIGTERM."""
    settings, socket = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        environment = environment_of(RolloutConfig.model_validate_json(settings.read_text()))
        asyncio.run(serve(environment, socket))
    except ConfigError as error:
        sys.exit(str(error))
    finally:
        socket.unlink(missing_ok=True)
        with suppress(OSError):  # the flow has removed the folder
            socket.parent.rmdir()


async def serve(environment: Environment, socket: Path) -> None:
    """Answer at a unix socket until SIGTERM."""
    runner = web.AppRunner(_application(environment), handler_cancellation=True, access_log=None)
    await runner.setup()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await web.UnixSite(runner, socket, backlog=BACKLOG).start()
    await ended.wait()


@dataclass(slots=True)
class _Opened:
    """An open episode; the lock keeps its calls apart."""

    episode: Episode
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Episodes:
    """The open episodes of a worker; one whose turn fails or is given up is closed at once."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._open: dict[str, _Opened] = {}

    async def reply(self, episode_id: str, turn: Turn) -> TurnAnswer:
        """The environment's turn; the first one opens the episode."""
        answered = False
        try:
            if episode_id not in self._open:
                self._open[episode_id] = _Opened(self._environment.episode(turn.example, turn.seed))
            opened = self._open[episode_id]
            async with opened.lock:
                value = tuple(await opened.episode.reply(turn.messages))
            answered = True
            return TurnAnswer(value=value)
        except Exception as error:  # noqa: BLE001 - environments are foreign code: the flow is told what they raised
            return TurnAnswer(raised=_raised(error))
        finally:
            if not answered:
                await self.close(episode_id)

    async def close(self, episode_id: str) -> CloseAnswer:
        """Close an episode; one that is not open has no outcome."""
        opened = self._open.pop(episode_id, None)
        if opened is None:
            return CloseAnswer()
        try:
            async with opened.lock:
                return CloseAnswer(value=await opened.episode.close())
        except Exception as error:  # noqa: BLE001 - as above
            return CloseAnswer(raised=_raised(error))


def _application(environment: Environment) -> web.Application:
    episodes = Episodes(environment)

    async def ping(_: web.Request) -> web.Response:
        return web.Response()

    async def describe(_: web.Request) -> web.Response:
        return _json(
            Description(
                name=environment.name,
                sizes={"train": environment.size("train"), "held_out": environment.size("held_out")},
                tools=[dict(tool) for tool in environment.tools],
                stop=list(environment.stop),
            )
        )

    async def example(request: web.Request) -> web.Response:
        wanted = _to_example_request(await request.read())
        try:
            return _json(ExampleAnswer(value=await environment.example(wanted.split, wanted.index)))
        except Exception as error:  # noqa: BLE001 - as above
            return _json(ExampleAnswer(raised=_raised(error)))

    async def reply(request: web.Request) -> web.Response:
        return _json(await episodes.reply(request.match_info["id"], _to_turn(await request.read())))

    async def close(request: web.Request) -> web.Response:
        return _json(await episodes.close(request.match_info["id"]))

    application = web.Application(client_max_size=MOST_BODY_BYTES)
    application.add_routes(
        [
            web.get("/ping", ping),
            web.get("/environment", describe),
            web.post("/example", example),
            web.post("/episodes/{id}/reply", reply),
            web.post("/episodes/{id}/close", close),
        ]
    )
    return application


def _json(answer: object) -> web.Response:
    """An answer as JSON; one that cannot be written so is an error of the environment."""
    try:
        body = msgspec.json.encode(answer)
    except (TypeError, ValueError) as error:
        body = msgspec.json.encode({"raised": _raised(error)})
    return web.Response(body=body, content_type="application/json")


def _raised(error: Exception) -> Raised:
    return Raised(type(error).__name__, str(error))


if __name__ == "__main__":
    main()
