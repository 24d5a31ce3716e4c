"""A worker process of an environment: `python -m tasks.rollout.env_worker CONFIG.json SOCKET`.

CONFIG.json is a RolloutConfig; SOCKET lies in a folder of its own. What the worker answers is in env_messages. It ends at SIGTERM.
"""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from tasks.errors import ConfigError, printable, text_of
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
from tasks.rollout.environment import Environment, Episode, Message, environment_of
from tasks.rollout.state import EpisodeState, state_of, states_of

MOST_BODY_BYTES = 1 << 30
BACKLOG = 4096
"""Connections that may wait to be accepted; at a unix socket one more is an error, not a wait."""

Value = TypeVar("Value")

_to_messages = msgspec.json.Decoder(tuple[Message, ...]).decode
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
            given = await _given(lambda: self._reply(episode_id, turn))
            if isinstance(given, Raised):
                return TurnAnswer(raised=given)
            answered = True
            return TurnAnswer(value=given)
        finally:
            if not answered:
                await self.close(episode_id)

    async def _reply(self, episode_id: str, turn: Turn) -> tuple[Message, ...]:
        """The environment's turn; what is none by its JSON is an error."""
        if episode_id not in self._open:
            self._open[episode_id] = _Opened(self._environment.episode(turn.example, turn.seed))
        opened = self._open[episode_id]
        async with opened.lock:
            return _to_messages(msgspec.json.encode(tuple(await opened.episode.reply(turn.messages))))

    async def close(self, episode_id: str) -> CloseAnswer:
        """Close an episode; one that is not open has no outcome."""
        opened = self._open.pop(episode_id, None)
        if opened is None:
            return CloseAnswer()
        given = await _given(lambda: _closed(opened))
        state = self._state_of(opened.episode)
        if isinstance(given, Raised):
            return CloseAnswer(raised=given, state=state.values, state_error=state.error)
        return CloseAnswer(value=given, state=state.values, state_error=state.error)

    def _state_of(self, episode: Episode) -> EpisodeState:
        """What the environment keeps of an episode; what cannot be sent is an error of that alone."""
        state = state_of(self._environment, episode)
        try:
            msgspec.json.encode(state.values)
        except Exception as error:  # noqa: BLE001 - what is written is foreign: RecursionError, say
            return EpisodeState(error=f"the state is not JSON: {text_of(error)}")
        return state


async def _closed(opened: _Opened) -> Mapping[str, object]:
    async with opened.lock:
        return await opened.episode.close()


async def _given(call: Callable[[], Awaitable[Value]]) -> Value | Raised:
    """What the environment gives, or what it raises instead, in a task of its own: it may cancel that."""
    async with asyncio.TaskGroup() as calling:
        called = calling.create_task(_caught(call))
    if called.cancelled():
        return Raised(
            "CancelledError", "the environment was cancelled, by itself or by something it waited for"
        )
    return called.result()


async def _caught(call: Callable[[], Awaitable[Value]]) -> Value | Raised:
    try:
        return await call()
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - foreign code: the flow is told of SystemExit too
        return _raised(error)


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
                states=dict(states_of(environment)),
            )
        )

    async def example(request: web.Request) -> web.Response:
        wanted = _to_example_request(await request.read())
        given = await _given(lambda: environment.example(wanted.split, wanted.index))
        return _json(ExampleAnswer(raised=given) if isinstance(given, Raised) else ExampleAnswer(value=given))

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
    except Exception as error:  # noqa: BLE001 - what is written is foreign: RecursionError, say
        body = msgspec.json.encode({"raised": _raised(error)})
    return web.Response(body=body, content_type="application/json")


def _raised(error: BaseException) -> Raised:
    return Raised(printable(type(error).__name__), text_of(error))


if __name__ == "__main__":
    main()
