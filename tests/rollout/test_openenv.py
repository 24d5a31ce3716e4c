"""Episodes of OpenEnv servers: of the project's own server code, and of servers that fail in every way."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from rollmill.tasks.errors import ConfigError, EpisodeError
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment import Conversation, Episode, Message, make_environment
from rollmill.tasks.rollout.environment_calls import check_environment
from rollmill.tasks.rollout.environments.openenv_environment import OpenEnv, show_observation
from rollmill.tasks.rollout.remote_environment import open_environment

SERVERS = Path(__file__).parents[1] / "servers"
CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'


def make_config(**arguments: object) -> RolloutConfig:
    return RolloutConfig.model_validate({"environment": {"name": "openenv", "args": arguments}})


def make(**arguments: object) -> OpenEnv:
    made = make_environment(make_config(**arguments))
    assert isinstance(made, OpenEnv)
    return made


def command(app: str) -> str:
    """Start a server of the module `openenv_tasks`, in the environment that has the library OpenEnv (`make test` makes it)."""
    python = Path(__file__).parents[2] / ".venv-openenv" / "bin" / "python"
    assert python.exists(), "`make test` makes .venv-openenv"
    return f"{python} -m uvicorn --app-dir {SERVERS} --log-level warning --port {{port}} openenv_tasks:{app}"


async def start(environment: OpenEnv, index: int = 0) -> tuple[Episode, Conversation]:
    episode = environment.episode(await environment.example("train", index), 0)
    try:
        opening = await episode.reply(())
    except EpisodeError:
        await episode.close()
        raise
    assert isinstance(opening, Conversation)
    return episode, opening


async def play_two_turns(episode: Episode) -> None:
    await episode.reply(())
    await say(episode, "hello")


async def say(episode: Episode, text: str) -> list[tuple[str, str]]:
    """What the environment answers, as (role, text)."""
    return [(each.role, each.content) for each in await episode.reply((Message("assistant", text),))]


def shares_servers(test: Callable[..., object]) -> Callable[..., object]:
    """A server ends with the event loop in which it was started."""
    return pytest.mark.slow(pytest.mark.asyncio(loop_scope="module")(test))


@pytest.fixture(scope="module")
def started() -> Callable[[str], OpenEnv]:
    """Environments with a server of the module `openenv_tasks` each, which starts with the first episode."""
    known: dict[str, OpenEnv] = {}
    further = {"echo": {"action": "message"}, "guess": {"reset": {"player": "you"}}}

    def find(app: str) -> OpenEnv:
        if app not in known:
            known[app] = make(command=command(app), **further.get(app, {}))
        return known[app]

    return find


@shares_servers
async def test_a_policy_acts_by_a_tool_with_the_form_of_the_environments_actions(
    started: Callable[[str], OpenEnv],
) -> None:
    episode, opening = await start(started("guess"), 7)
    assert opening.messages == [Message("user", "guess, you")]
    assert opening.tools is not None
    (tool,) = opening.tools
    assert tool["type"] == "function"
    function: Any = tool["function"]
    assert (function["name"], function["description"]) == ("act", "Guess the number.")
    assert [*function["parameters"]["properties"]] == ["number"]
    assert await say(episode, CALL % ("act", '{"number": 3}')) == [("tool", "more")]
    ((_, wrong),) = await say(episode, CALL % ("act", '{"number": "x"}'))
    assert wrong.startswith("error: Invalid message")
    assert "number" in wrong
    assert await say(episode, CALL % ("go", "{}")) == [("tool", "error: there is no tool 'go', only act")]
    assert await say(episode, CALL % ("act", '{"number": 9}') + CALL % ("act", '{"number": 7}')) == []
    assert await episode.close() == {
        "metrics": {"steps": 3},
        "reward": 0.5,
        "turn_rewards": [-0.25, 0.0, 0.0, 0.75],
    }


@shares_servers
async def test_an_episode_without_an_end_has_what_it_earned_so_far(started: Callable[[str], OpenEnv]) -> None:
    episode, _ = await start(started("guess"), 7)
    await say(episode, CALL % ("act", '{"number": 3}'))
    assert await episode.close() == {"metrics": {"steps": 1}, "reward": -0.25}
    episode, _ = await start(started("guess"), 7)
    assert await episode.close() == {"metrics": {"steps": 0}, "reward": 0}


@shares_servers
async def test_sessions_of_ended_episodes_are_free_for_others(started: Callable[[str], OpenEnv]) -> None:
    """The server has two places."""
    for _ in range(5):
        both = [await start(started("guess"), 7) for _ in range(2)]
        with pytest.raises(EpisodeError, match="reports CAPACITY_REACHED"):
            await start(started("guess"))
        for episode, _ in both:
            await episode.close()


@shares_servers
async def test_what_breaks_in_the_environment_fails_the_episode(started: Callable[[str], OpenEnv]) -> None:
    episode, _ = await start(started("guess"), 7)
    with pytest.raises(EpisodeError, match="reports EXECUTION_ERROR: the game is broken"):
        await say(episode, CALL % ("act", '{"number": 99}'))
    await episode.close()


@shares_servers
async def test_the_policys_message_may_be_the_action(started: Callable[[str], OpenEnv]) -> None:
    episode, opening = await start(started("echo"))
    assert (opening.messages, opening.tools) == ([Message("user", "speak")], [])
    assert await say(episode, "hello") == [("user", "you said hello")]
    # There is no reward that a scorer could take for 0.
    assert await episode.close() == {"metrics": {"steps": 1}}


@shares_servers
async def test_tools_of_the_model_context_protocol_are_those_of_the_policy(
    started: Callable[[str], OpenEnv],
) -> None:
    episode, opening = await start(started("shop"))
    assert opening.tools is not None
    (tool,) = opening.tools
    function: Any = tool["function"]
    assert (function["name"], function["description"]) == ("price", "Price of a fruit.")
    assert function["parameters"]["properties"]["fruit"]["type"] == "string"
    assert await say(episode, CALL % ("price", '{"fruit": "apple"}')) == [("tool", "3")]
    ((_, wrong),) = await say(episode, CALL % ("price", '{"fruit": "fig"}'))
    assert wrong.startswith("error: ")
    assert await say(episode, "it costs 3") == []
    assert await episode.close() == {
        "metrics": {"steps": 2},
        "reward": 1.0,
        "turn_rewards": [1.0, 0.0, 0.0],
    }


def find_servers() -> set[psutil.Process]:
    found: set[psutil.Process] = set()
    for each in psutil.Process().children(recursive=True):
        # One that has just ended has no command.
        with suppress(psutil.Error):
            found |= {each} if each.cmdline()[1:3] == ["-m", "uvicorn"] else set()
    return found


@pytest.mark.slow
async def test_a_server_that_was_started_starts_again_after_its_end() -> None:
    others, environment = find_servers(), make(command=command("echo"), action="message")
    episode, _ = await start(environment)
    (server,) = find_servers() - others
    supervisor = server.parents()[0]
    server.kill()
    with pytest.raises(EpisodeError, match="closed the connection"):
        await say(episode, "hello")
    await episode.close()
    assert not psutil.wait_procs([supervisor], 20)[1]
    episode, _ = await start(environment)
    assert await say(episode, "hello") == [("user", "you said hello")]
    await episode.close()


@pytest.mark.slow
async def test_a_server_that_does_not_start_fails_the_episode() -> None:
    with pytest.raises(EpisodeError, match="the OpenEnv server ended with status 3"):
        await start(make(command="bash -c 'exit 3' {port}", action="message"))


@pytest.mark.slow
async def test_it_is_played_in_a_worker_process_that_takes_its_server_along(tmp_path: Path) -> None:
    config, others = make_config(command=command("echo"), action="message"), find_servers()
    await asyncio.to_thread(check_environment, make_environment(config), config)
    # The check's event loop has ended.
    assert find_servers() == others
    async with open_environment(config, logs=tmp_path) as environment:
        example = await environment.example("held_out", 3)
        assert example.content == {"seed": 1003}
        episode = environment.episode(example, 0)
        assert await episode.reply(()) == Conversation((Message("user", "speak"),), [])
        assert await say(episode, "hello") == [("user", "you said hello")]
        await episode.close()
        servers = find_servers() - others
        assert servers
    assert not psutil.wait_procs(servers, 20)[1]


Act = Callable[[web.WebSocketResponse], Awaitable[object]]


async def hang(_: web.WebSocketResponse) -> None:
    await asyncio.sleep(600.0)


async def leave(socket: web.WebSocketResponse) -> None:
    await socket.close()


def send(text: str) -> Act:
    return lambda socket: socket.send_str(text)


GREETING = send('{"type": "observation", "data": {"observation": {"text": "hi"}}}')
SCHEMA = {"action": {"type": "object", "properties": {"message": {"type": "string"}}}}


@pytest.fixture
def serve() -> Callable[..., AbstractAsyncContextManager[str]]:
    """A server that does one act after each message of a session, and then ends it."""

    @asynccontextmanager
    async def serving(acts: Sequence[Act], schema: object = SCHEMA) -> AsyncIterator[str]:
        async def play(request: web.Request) -> web.WebSocketResponse:
            socket = web.WebSocketResponse()
            await socket.prepare(request)
            for act in acts:
                await socket.receive()
                await act(socket)
            return socket

        async def give_schema(_: web.Request) -> web.Response:
            return web.json_response(schema)

        application = web.Application()
        application.add_routes([web.get("/schema", give_schema)] + ([web.get("/ws", play)] if acts else []))
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        try:
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()

    return serving


@pytest.mark.parametrize(
    ("acts", "error"),
    [
        ([], "does not answer: WSServerHandshakeError: 404"),
        ([send("<html>")], "sent no message of OpenEnv: JSON is malformed"),
        ([send("5")], "sent no message of OpenEnv: Expected `object`"),
        (
            [send('{"type": "observation", "data": {}}')],
            "to reset is wrong: Object missing required field `observation`",
        ),
        (
            [send('{"type": "observation", "data": {"observation": {}, "done": true}}')],
            "the episode is over: nothing was asked",
        ),
        ([leave], r"closed the connection \(CLOSE"),
        (
            [send('{"type": "error", "data": {"message": "no room", "code": "SESSION_ERROR"}}')],
            "SESSION_ERROR: no room",
        ),
        ([GREETING, leave], r"closed the connection \(CLOSE"),
        ([GREETING], r"closed the connection \(CLOSE"),
        (
            [GREETING, send('{"type": "observation", "data": {"observation": {}, "reward": "much"}}')],
            "to step is wrong",
        ),
    ],
)
async def test_what_a_server_does_wrong_fails_the_episode_with_the_reason(
    serve: Callable[..., AbstractAsyncContextManager[str]], acts: Sequence[Act], error: str
) -> None:
    async with serve(acts) as url:
        environment = make(url=url, action="message")
        episode = environment.episode(await environment.example("train", 0), 0)
        with pytest.raises(EpisodeError, match=error):
            await play_two_turns(episode)
        await episode.close()


async def test_an_address_without_a_server_and_one_without_a_schema_are_named(
    serve: Callable[..., AbstractAsyncContextManager[str]],
) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EpisodeError, match=f"the server at {gone} does not answer"):
        await start(make(url=gone, action="message"))
    async with serve([GREETING], schema=[]) as url:
        with pytest.raises(EpisodeError, match="gives no schema of its actions"):
            await start(make(url=url))


@pytest.mark.parametrize(
    "result",
    ["[1]", '{"tools": ["look"]}', '{"tools": [{"description": "no name"}]}', '{"tools": []}', "null"],
)
async def test_a_wrong_list_of_tools_is_an_error_with_the_address(
    serve: Callable[..., AbstractAsyncContextManager[str]], result: str
) -> None:
    schema = {"action": {"properties": {"tool_name": {}, "arguments": {}}}}
    listed = send(f'{{"type": "mcp", "data": {{"result": {result}}}}}')
    async with serve([GREETING, listed], schema=schema) as url:
        with pytest.raises(EpisodeError, match=f"the server at {url} lists no tools"):
            await start(make(url=url))


async def test_errors_of_any_form_in_an_action_are_shown(
    serve: Callable[..., AbstractAsyncContextManager[str]],
) -> None:
    wrong = send(
        '{"type": "error", "data": {"message": "no", "code": "VALIDATION_ERROR", "errors": ["a", {"loc": 1, "msg": 2}]}}'
    )
    async with serve([GREETING, wrong]) as url:
        episode, _ = await start(make(url=url, action="message"))
        assert await say(episode, "hello") == [("user", "error: no; a; 1: 2")]
        await episode.close()


async def test_a_session_that_hangs_is_left_in_time(
    serve: Callable[..., AbstractAsyncContextManager[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmill.tasks.rollout.environments.openenv_environment.CLOSE_S", 0.2)
    async with serve([GREETING, hang]) as url:
        episode, _ = await start(make(url=url, action="message"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await say(episode, "hello")
        # An episode has five seconds to close.
        async with asyncio.timeout(4.0):
            assert await episode.close() == {"metrics": {"steps": 0}, "reward": 0.0}


@pytest.mark.parametrize(
    ("observation", "shown"),
    [
        ({"text": "a door", "metadata": {"step": 1}, "hint": None}, "a door"),
        ({"row": 1, "column": 2}, '{"row": 1, "column": 2}'),
        ({"board": [1]}, '{"board": [1]}'),
        ({}, ""),
        ({"tool_name": "price", "result": {"content": [{"text": "3"}, {"text": "4"}]}}, "3\n4"),
        ({"tool_name": "price", "result": 3}, "3"),
        ({"tool_name": "price", "result": {"content": ["3"]}}, "3"),
        ({"tool_name": "price", "error": {"message": "no fig"}}, "error: no fig"),
    ],
)
def test_an_observation_is_shown_as_text(observation: dict[str, object], shown: str) -> None:
    assert show_observation(observation) == shown


async def test_a_field_of_the_observation_may_be_named(
    serve: Callable[..., AbstractAsyncContextManager[str]],
) -> None:
    async with serve([send('{"type": "observation", "data": {"observation": {"a": "x", "b": [1]}}}')]) as url:
        _, opening = await start(make(url=url, action="message", observation="b"))
        assert opening.messages == [Message("user", "[1]")]
        with pytest.raises(EpisodeError, match="has no 'c'"):
            await start(make(url=url, action="message", observation="c"))


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({}, "give either the url"),
        ({"url": "http://host", "command": "true"}, "give either the url"),
        ({"url": "host:80"}, "write http://HOST:PORT"),
        ({"command": "true"}, "must have {port}"),
        ({"command": "no-such-program {port}"}, "is not found"),
        ({"command": "echo 'one"}, "cannot be split into words"),
        (
            {"url": "http://host", "train": 0},
            "train: Input should be greater than or equal to 1; it takes url: str",
        ),
        ({"url": "http://host", "tasks": 5}, "there is no tasks; it takes url: str = '', command"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, object], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as refused:
        make(**arguments)
    assert refused.value.field.startswith("rollout.environment.args")
