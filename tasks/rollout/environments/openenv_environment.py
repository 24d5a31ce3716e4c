"""The environment `openenv`: a server of an OpenEnv environment plays the episodes, one that runs or one that is started here.

Each episode is a WebSocket connection with the messages of the OpenEnv project, huggingface/OpenEnv; its library is not needed here.
"""

import asyncio
import json
import shlex
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Self

import msgspec
from aiohttp import (
    ClientError,
    ClientSession,
    ClientTimeout,
    ClientWebSocketResponse,
    ClientWSTimeout,
    WSMsgType,
)
from pydantic import Field

from rollmill.tasks.errors import ConfigError, EpisodeError
from rollmill.tasks.processes.launched_process import LaunchedProcess, free_port, split_command
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment import Conversation, Episode, Example, Message, Split
from rollmill.tasks.rollout.tools import tool_calls
from rollmill.tasks.user_code.worker_process import select_user_variables

TOOL = "act"
CLOSE_S = 2.0
"""Seconds in which a server may end its session; an episode has five to close (EpisodePlayer.cut_grace_s)."""
MAX_MESSAGE_BYTES = 16 << 20
# Seconds between two questions whether a server that was started is up.
_PAUSE_S = 0.1
# What an observation has besides what the environment shows.
_NOT_SHOWN = ("done", "reward", "metadata")


FIELD = "rollout.environment.args"


@dataclass(frozen=True, slots=True)
class OpenEnvArguments:
    """Arguments of the environment, as `OpenEnv.from_config` takes them."""

    url: str
    command: str
    train: int
    held_out: int
    reset: Mapping[str, Any]
    action: str
    observation: str


class _ListedTool(msgspec.Struct):
    name: str
    description: str | None = None
    inputSchema: dict[str, Any] | None = None  # noqa: N815 - the name of the Model Context Protocol
    input_schema: dict[str, Any] | None = None


class _ListedTools(msgspec.Struct):
    tools: list[_ListedTool]


class _Answer(msgspec.Struct):
    type: str
    data: dict[str, Any] = {}


class _Seen(msgspec.Struct):
    """What an environment shows after a reset or an action."""

    observation: dict[str, Any]
    reward: float | bool | None = None
    done: bool = False


class InvalidActionError(EpisodeError):
    """The server refuses an action: it does not have the form that the environment takes."""


class OpenEnv:
    """Environment of an OpenEnv server, whose problems are seeds."""

    name = "openenv"
    # An episode's opening has its tools.
    tools = ()
    stop = ()

    def __init__(self, arguments: OpenEnvArguments, system: str, variables: Mapping[str, str]) -> None:
        self._arguments, self._system = arguments, system
        self._server = OpenEnvServer(arguments, variables)

    @classmethod
    def from_config(
        cls,
        config: RolloutConfig,
        *,
        url: Annotated[str, Field(description="Address of a server, such as http://127.0.0.1:8000.")] = "",
        command: Annotated[
            str,
            Field(
                description="Starts a server on loopback; {port} is replaced by a free port. Instead of url."
            ),
        ] = "",
        train: Annotated[int, Field(ge=1, description="Training problems: seeds from 0 on.")] = 1000,
        held_out: Annotated[int, Field(ge=0, description="Held-out problems: the seeds that follow.")] = 200,
        reset: Annotated[Mapping[str, Any], Field(description="Further arguments of each reset.")] = {},
        action: Annotated[
            str,
            Field(
                description="Field of an action that is the policy's whole message; empty: the policy calls tools."
            ),
        ] = "",
        observation: Annotated[
            str,
            Field(
                description="Field of an observation that is shown; empty: its only text, or all of it as JSON."
            ),
        ] = "",
    ) -> Self:
        """Create the environment; ConfigError names a wrong argument. A server that is started here starts with the first episode."""
        if bool(url) == bool(command):
            raise ConfigError(
                FIELD, config.environment.args, "give either the url of a server or a command that starts one"
            )
        if url:
            check_url(url)
        else:
            _check_command(command)
        arguments = OpenEnvArguments(url, command, train, held_out, reset, action, observation)
        return cls(arguments, config.prompts.system, select_user_variables(config.env_variables))

    def size(self, split: Split) -> int:
        return self._arguments.train if split == "train" else self._arguments.held_out

    async def example(self, split: Split, index: int) -> Example:
        seed = index if split == "train" else self._arguments.train + index
        return Example(f"seed {seed}", {"seed": seed})

    def episode(self, example: Example, seed: int) -> Episode:
        reset = {"seed": example.content["seed"], **self._arguments.reset}
        return OpenEnvEpisode(self._server, self._arguments, reset, self._system)


def check_url(url: str) -> None:
    """Raise ConfigError unless the argument `url` of an environment is an address."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{FIELD}.url", url, "it is no address: write http://HOST:PORT")


def _check_command(command: str) -> None:
    field = f"{FIELD}.command"
    split_command(field, command)
    if "{port}" not in command:
        raise ConfigError(field, command, "it must have {port} where the server's port is written")


class OpenEnvServer:
    """An OpenEnv server: one that runs, or one that is started before the first episode, and again if it ended.

    One that was started ends with the event loop, and with this process however that ends.
    """

    def __init__(self, arguments: OpenEnvArguments, variables: Mapping[str, str]) -> None:
        self.url = arguments.url.rstrip("/")
        self._command, self._variables = arguments.command, variables
        self._process: LaunchedProcess | None = None
        self._holding: asyncio.Task[None] | None = None
        self._is_up = not arguments.command
        self._starting = asyncio.Lock()

    async def connect(self, stack: AsyncExitStack) -> tuple[ClientSession, ClientWebSocketResponse]:
        """Open a session of the server, which `stack` closes; raises EpisodeError if the server is not there."""
        session = await stack.enter_async_context(ClientSession(timeout=ClientTimeout(None)))
        if self._command:
            async with self._starting:
                await self._start(session)
        with guard_connection(self.url):
            # An episode's time limit bounds what the server takes.
            waits = ClientWSTimeout(ws_receive=None, ws_close=CLOSE_S / 2)
            connecting = session.ws_connect(f"{self.url}/ws", timeout=waits, max_msg_size=MAX_MESSAGE_BYTES)
            return session, await stack.enter_async_context(connecting)

    async def _start(self, session: ClientSession) -> None:
        """Start the server unless it runs, and wait until it answers."""
        if self._process is None or not self._process.is_running:
            port = free_port()
            self.url, self._is_up = f"http://127.0.0.1:{port}", False
            words = shlex.split(self._command.replace("{port}", str(port)))
            self._process = LaunchedProcess.start("OpenEnv server", words, log=None, env=self._variables)
            self._holding = asyncio.create_task(_hold(self._process))
        while not self._is_up:
            with suppress(ClientError, OSError):
                async with session.get(f"{self.url}/health") as answer:
                    self._is_up = answer.ok
            if not self._process.is_running:
                status = self._process.returncode
                raise EpisodeError(f"the OpenEnv server ended with status {status}: {self._command}")
            await asyncio.sleep(0 if self._is_up else _PAUSE_S)


async def _hold(process: LaunchedProcess) -> None:
    """Wait for the end of a process, and end it if this is cancelled, as all tasks are at the end of their event loop."""
    try:
        await process.wait()
    finally:
        await process.stop()


@contextmanager
def guard_connection(url: str) -> Iterator[None]:
    """Convert errors of a connection to EpisodeErrors that name the server."""
    try:
        yield
    except (ClientError, OSError) as error:
        raise EpisodeError(f"the server at {url} does not answer: {type(error).__name__}: {error}") from error


class OpenEnvEpisode:
    """A session of the server: reset for the opening, then a step for each message, or for each call of a tool."""

    def __init__(
        self, server: OpenEnvServer, arguments: OpenEnvArguments, reset: Mapping[str, object], system: str
    ) -> None:
        self._server, self._arguments, self._reset, self._system = server, arguments, reset, system
        self._stack = AsyncExitStack()
        self._http: ClientSession
        self._socket: ClientWebSocketResponse | None = None
        self._has_mcp = False
        self._tools: Mapping[str, Mapping[str, object]] = {}
        self._n_steps, self._rewards = 0, list[float]()
        self._has_reward = self._is_done = self._is_complete = False

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message] | Conversation:
        if not messages:
            return await self._open()
        self._rewards.append(0.0)
        said = messages[-1].content
        if self._arguments.action:
            answers = [Message("user", await self._step({self._arguments.action: said}))]
        else:
            answers = [each async for each in self._call(said)]
        self._is_complete = self._is_done or not answers
        return () if self._is_complete else answers

    async def close(self) -> Mapping[str, object]:
        """End the session, whose place in the server is free then, and return the rewards."""
        async with self._stack:
            # The server closes the connection once it has ended the session.
            with suppress(ClientError, OSError, TimeoutError):
                if self._socket is not None:
                    async with asyncio.timeout(CLOSE_S):
                        await self._socket.send_json({"type": "close"})
                        async for _ in self._socket:
                            pass
        outcome: dict[str, object] = {"metrics": {"steps": self._n_steps}}
        if self._has_reward or not self._n_steps:
            outcome["reward"] = sum(self._rewards)
        # The last message of a truncated episode was not given to the server.
        if self._has_reward and self._is_complete:
            outcome["turn_rewards"] = self._rewards
        return outcome

    async def _open(self) -> Conversation:
        self._http, self._socket = await self._server.connect(self._stack)
        if not self._arguments.action:
            self._tools = await self._find_tools(self._socket)
        seen = await self._request(self._socket, "reset", self._reset)
        if seen.done:
            raise EpisodeError(
                "the server's answer to reset says that the episode is over: nothing was asked"
            )
        opening = [Message("user", self._show(seen.observation))]
        if self._system:
            opening.insert(0, Message("system", self._system))
        return Conversation(
            opening, [{"type": "function", "function": each} for each in self._tools.values()]
        )

    async def _call(self, said: str) -> AsyncIterator[Message]:
        """Yield the answer to each call of a tool in the policy's message, until the episode is over."""
        for call in tool_calls(said):
            if self._is_done:
                return
            if call.name not in self._tools:
                known = ", ".join(self._tools)
                yield Message(
                    "tool",
                    f"error: there is no tool {call.name!r}, only {known}",
                    name=next(iter(self._tools)),
                )
                continue
            action = dict(call.arguments)
            if self._has_mcp:
                action = {"type": "call_tool", "tool_name": call.name, "arguments": action}
            yield Message("tool", await self._step(action), name=call.name)

    async def _step(self, action: Mapping[str, object]) -> str:
        """Take a step and return what the policy is shown of it; that may be that its action does not fit."""
        assert self._socket is not None
        try:
            seen = await self._request(self._socket, "step", action)
        except InvalidActionError as error:
            return f"error: {error}"
        self._n_steps += 1
        if seen.reward is not None:
            self._has_reward = True
            self._rewards[-1] += float(seen.reward)
        self._is_done = seen.done
        return self._show(seen.observation)

    def _show(self, observation: Mapping[str, Any]) -> str:
        if not self._arguments.observation:
            return show_observation(observation)
        if (shown := observation.get(self._arguments.observation)) is None:
            raise EpisodeError(f"an observation has no {self._arguments.observation!r}: {observation!r:.200}")
        return shown if isinstance(shown, str) else json.dumps(shown)

    async def _find_tools(self, socket: ClientWebSocketResponse) -> Mapping[str, Mapping[str, object]]:
        """Return the functions that the policy may call, by name: those of an environment with MCP, otherwise one that takes an action."""
        with guard_connection(self._server.url):
            async with self._http.get(f"{self._server.url}/schema") as answer:
                text = await answer.read()
        try:
            action = msgspec.json.decode(text, type=dict[str, Any])["action"]
            parameters = {name: each for name, each in action["properties"].items() if name != "metadata"}
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            raise EpisodeError(
                f"the server at {self._server.url} gives no schema of its actions: {text!r:.200}"
            ) from error
        self._has_mcp = {"tool_name", "arguments"} <= parameters.keys()
        if not self._has_mcp:
            described = {"description": action.get("description") or "Act in the environment."}
            return {TOOL: {"name": TOOL, **described, "parameters": {**action, "properties": parameters}}}
        answered = await self._ask(socket, "mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
        try:
            listed = msgspec.convert(answered.get("result"), _ListedTools).tools
        except msgspec.ValidationError as error:
            raise EpisodeError(
                f"the server at {self._server.url} lists no tools: {error}: {answered!r:.200}"
            ) from error
        if not listed:
            raise EpisodeError(f"the server at {self._server.url} lists no tools: {answered!r:.200}")
        return {
            each.name: {
                "name": each.name,
                "description": each.description or "",
                "parameters": each.inputSchema or each.input_schema or {"type": "object"},
            }
            for each in listed
        }

    async def _request(self, socket: ClientWebSocketResponse, kind: str, data: Mapping[str, object]) -> _Seen:
        seen = await self._ask(socket, kind, data)
        try:
            return msgspec.convert(seen, _Seen)
        except msgspec.ValidationError as error:
            raise EpisodeError(
                f"the answer of the server at {self._server.url} to {kind} is wrong: {error}"
            ) from error

    async def _ask(
        self, socket: ClientWebSocketResponse, kind: str, data: Mapping[str, object]
    ) -> dict[str, Any]:
        """Send a message and return the data of its answer.

        Raises:
            InvalidActionError: an action does not have the form that the environment takes.
            EpisodeError: the environment failed, or the server ended the session.
        """
        url = self._server.url
        with guard_connection(url):
            await socket.send_json({"type": kind, "data": data})
            message = await socket.receive()
        if message.type is not WSMsgType.TEXT:
            raise EpisodeError(
                f"the server at {url} closed the connection ({message.type.name}: {message.data!r:.200})"
            )
        try:
            answer = msgspec.json.decode(message.data, type=_Answer)
        except msgspec.DecodeError as error:
            raise EpisodeError(f"the server at {url} sent no message of OpenEnv: {error}") from error
        if answer.type != "error":
            return answer.data
        said, code = answer.data.get("message"), answer.data.get("code")
        if kind == "step" and code == "VALIDATION_ERROR":
            errors = answer.data.get("errors")
            wrong = [
                f"{each.get('loc')}: {each.get('msg')}" if isinstance(each, Mapping) else str(each)
                for each in (errors if isinstance(errors, list) else ())
            ]
            raise InvalidActionError("; ".join([str(said), *wrong]))
        raise EpisodeError(f"the server at {url} reports {code}: {said}")


def show_observation(observation: Mapping[str, Any]) -> str:
    """Return what the policy is shown of an observation: its only text, or the result of a tool, or all of it as JSON.

    Example: {"text": "a door", "metadata": {}} is shown as "a door", and {"row": 1, "column": 2} as its JSON.
    """
    shown = {
        name: value for name, value in observation.items() if value is not None and name not in _NOT_SHOWN
    }
    if "tool_name" in shown:
        if error := shown.get("error"):
            return f"error: {error.get('message', error) if isinstance(error, Mapping) else error}"
        result = shown.get("result")
        parts = result.get("content") if isinstance(result, Mapping) else None
        if isinstance(parts, list):
            return "\n".join(
                str(each.get("text", each) if isinstance(each, Mapping) else each) for each in parts
            )
        return result if isinstance(result, str) else json.dumps(result)
    (only, *others) = shown.values() or ("",)
    return only if isinstance(only, str) and not others else json.dumps(shown)
