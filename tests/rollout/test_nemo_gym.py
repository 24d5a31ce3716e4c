"""Tasks of NeMo Gym, with a resources server made here that speaks its protocol."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollmill.tasks.errors import ConfigError, EpisodeError
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment import Conversation, Episode, Message, TokenCounts, make_environment
from rollmill.tasks.rollout.environment_calls import report_cut
from rollmill.tasks.rollout.environments.nemo_gym_environment import NemoGym
from rollmill.tasks.rollout.remote_environment import open_environment

CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
TOOL = {
    "type": "function",
    "name": "increment_counter",
    "description": "",
    "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
    "strict": True,
}
TASK = {
    "responses_create_params": {"input": [{"role": "user", "content": "add 1, then 2"}], "tools": [TOOL]},
    "initial_count": 3,
    "expected_count": 6,
}
"""A task of the server `example_session_state_mgmt` of NeMo Gym."""


class Counters:
    """A resources server with a counter for each session, which it knows by a cookie, as NeMo Gym's servers do."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self.verified: list[dict[str, Any]] = []
        self.verdict: dict[str, Any] | str | None = None
        self.status = 200

    async def seed(self, request: web.Request) -> web.Response:
        session = uuid.uuid4().hex
        self.counters[session] = (await request.json())["initial_count"]
        answer = web.json_response({}, status=self.status)
        answer.set_cookie("session", session)
        return answer

    async def increment(self, request: web.Request) -> web.Response:
        count = (await request.json()).get("count")
        if not isinstance(count, int):
            return web.json_response({"detail": "count is no number"}, status=422)
        self.counters[request.cookies["session"]] += count
        return web.json_response({"success": True})

    async def verify(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.verified.append(asked)
        if self.verdict == "hang":
            await asyncio.sleep(600.0)
        if isinstance(self.verdict, str):
            return web.Response(text=self.verdict)
        count = self.counters[request.cookies["session"]]
        found = {"reward": float(count == asked["expected_count"]), "count": count, "note": "counted"}
        return web.json_response({**asked, **found, **(self.verdict or {})}, status=self.status)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        application = web.Application()
        posts = {"/seed_session": self.seed, "/increment_counter": self.increment, "/verify": self.verify}
        application.add_routes([web.post(path, handler) for path, handler in posts.items()])
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        try:
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()


Make = Callable[..., NemoGym]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """An environment with these tasks, a line each."""

    def made(url: str, *tasks: object, **prompts: object) -> NemoGym:
        path = tmp_path / "tasks.jsonl"
        path.write_text("".join(f"{json.dumps(each)}\n" for each in tasks or [TASK]))
        given = {
            "environment": {"name": "nemo_gym", "args": {"url": url}},
            "prompts": {"path": str(path), "held_out_share": 0.0001, **prompts},
        }
        environment = make_environment(RolloutConfig.model_validate(given))
        assert isinstance(environment, NemoGym)
        return environment

    return made


async def start(environment: NemoGym) -> tuple[Episode, Conversation]:
    episode = environment.episode(await environment.example("train", 0), 0)
    opening = await episode.reply(())
    assert isinstance(opening, Conversation)
    return episode, opening


async def say(episode: Episode, text: str) -> list[tuple[str, str]]:
    return [(each.role, each.content) for each in await episode.reply((Message("assistant", text),))]


async def test_the_server_runs_the_tools_of_a_session_and_verifies_the_response(make: Make) -> None:
    server = Counters()
    async with server.serve() as url:
        environment = make(url)
        others = [await start(environment) for _ in range(2)]
        episode, opening = await start(environment)
        assert opening.messages == [Message("user", "add 1, then 2")]
        function = {name: value for name, value in TOOL.items() if name not in ("type", "strict")}
        assert opening.tools == [{"type": "function", "function": function}]
        episode.take_counts(TokenCounts(20, 9))
        said = "I add. " + CALL % ("increment_counter", '{"count": 1}')
        assert await say(episode, said) == [("tool", '{"success": true}')]
        episode.take_counts(TokenCounts(40, 9))
        assert await say(episode, CALL % ("increment_counter", '{"count": 2}')) == [
            ("tool", '{"success": true}')
        ]
        episode.take_counts(TokenCounts(60, 3))
        assert await say(episode, "it is 6") == []
        assert await episode.close() == {"reward": 1.0, "metrics": {"count": 6, "calls": 2}}
        for each, _ in others:
            assert (await each.close())["reward"] == 0.0
    asked = server.verified[0]
    assert {name: asked[name] for name in TASK} == TASK
    response = asked["response"]
    shown = [
        (each["type"], each.get("name") or each.get("output") or each["content"][0]["text"])
        for each in response["output"]
    ]
    assert shown == [
        ("message", "I add."),
        ("function_call", "increment_counter"),
        ("function_call_output", '{"success": true}'),
        ("function_call", "increment_counter"),
        ("function_call_output", '{"success": true}'),
        ("message", "it is 6"),
    ]
    calls = [each["call_id"] for each in response["output"] if each["type"] != "message"]
    assert calls[0] == calls[1] != calls[2] == calls[3]
    assert response["usage"]["total_tokens"] == 141


@pytest.mark.slow
async def test_the_response_is_one_of_openais_which_servers_check(make: Make) -> None:
    from openai.types.responses import Response  # its import takes two seconds

    server = Counters()
    async with server.serve() as url:
        episode, _ = await start(make(url))
        await say(episode, CALL % ("increment_counter", '{"count": 3}'))
        assert await say(episode, "it is 6") == []
        await episode.close()
    response = server.verified[0]["response"]
    # NeMo Gym adds the answers of tools to the items that OpenAI's have.
    items = [each for each in response["output"] if each["type"] != "function_call_output"]
    checked = Response.model_validate({**response, "output": items})
    assert [each.type for each in checked.output] == ["function_call", "message"]


async def test_the_policys_mistakes_are_answers_and_no_path_of_the_server(make: Make) -> None:
    server = Counters()
    async with server.serve() as url:
        episode, _ = await start(make(url))
        assert await say(episode, CALL % ("increment_counter", '{"count": "x"}')) == [
            ("tool", '{"detail": "count is no number"}')
        ]
        ((_, shown),) = await say(episode, CALL % ("verify", "{}"))
        assert shown == '{"error": "there is no tool \'verify\', only increment_counter"}'
        assert not server.verified
        await episode.close()


async def test_a_truncated_episode_is_verified_as_it_is(make: Make) -> None:
    server = Counters()
    async with server.serve() as url:
        episode, _ = await start(make(url))
        await say(episode, CALL % ("increment_counter", '{"count": 3}'))
        assert await episode.close() == {"reward": 1.0, "metrics": {"count": 6, "calls": 1}}


async def test_an_answer_that_a_limit_cut_is_the_end_of_the_response(make: Make) -> None:
    server = Counters()
    async with server.serve() as url:
        episode, _ = await start(make(url))
        report_cut(episode, Message("assistant", "I think that"), TokenCounts(5, 3))
        await episode.close()
    (verified,) = server.verified
    assert verified["response"]["output"][-1]["content"][0]["text"] == "I think that"
    assert verified["response"]["usage"]["output_tokens"] == 3


@pytest.mark.slow
async def test_a_cut_answer_reaches_an_episode_in_a_worker_process(make: Make, tmp_path: Path) -> None:
    server = Counters()
    async with server.serve() as url:
        make(url)
        given = {
            "environment": {"name": "nemo_gym", "args": {"url": url}},
            "prompts": {"path": str(tmp_path / "tasks.jsonl"), "held_out_share": 0.0001},
            "env_workers": 1,
        }
        async with open_environment(RolloutConfig.model_validate(given), logs=tmp_path) as environment:
            episode = environment.episode(await environment.example("train", 0), 0)
            await episode.reply(())
            report_cut(episode, Message("assistant", "I think that"), TokenCounts(5, 3))
            await episode.close()
    assert server.verified[0]["response"]["output"][-1]["content"][0]["text"] == "I think that"


@pytest.mark.parametrize(
    ("verdict", "status", "error"),
    [
        ({"reward": None}, 200, "verified without a reward: Expected `float`, got `null` - at `$.reward`"),
        ("<html>", 200, "verified without a reward: JSON is malformed"),
        ({"reward": 1.0}, 500, "answered /verify with 500: {"),
    ],
)
async def test_a_wrong_verdict_fails_the_episode(
    make: Make, verdict: dict[str, Any] | str, status: int, error: str
) -> None:
    server = Counters()
    async with server.serve() as url:
        episode, _ = await start(make(url))
        server.verdict, server.status = verdict, status
        with pytest.raises(EpisodeError) as raised:
            await say(episode, "done")
        assert error in str(raised.value)
        assert error in str((await episode.close())["error"])


async def test_a_reward_that_measures_no_policy_is_none(make: Make) -> None:
    server = Counters()
    server.verdict = {"mask_sample": True, "failure_reason": "no judge"}
    async with server.serve() as url:
        episode, _ = await start(make(url))
        await say(episode, "done")
        assert await episode.close() == {"error": f"the server at {url} has no valid reward: no judge"}


async def test_a_server_that_is_gone_or_does_not_seed_or_hangs_is_named(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EpisodeError, match=f"the server at {gone} does not answer"):
        await start(make(gone))
    server = Counters()
    async with server.serve() as url:
        server.status = 500
        with pytest.raises(EpisodeError, match="answered /seed_session with 500"):
            await start(make(url))
        server.status, server.verdict = 200, "hang"
        episode, _ = await start(make(url))
        monkeypatch.setattr("rollmill.tasks.rollout.environments.nemo_gym_environment.CLOSE_S", 0.2)
        assert await episode.close() == {"error": f"the server at {url} did not verify it in 0.2 s"}
        episode, _ = await start(make(url))
    with pytest.raises(EpisodeError, match="does not answer"):
        await say(episode, CALL % ("increment_counter", '{"count": 1}'))
    await episode.close()


def test_tasks_are_split_by_what_the_policy_is_asked(make: Make, tmp_path: Path) -> None:
    def task(text: str) -> dict[str, object]:
        return {"responses_create_params": {"input": text}}

    tasks = [task(f"count to {n % 40}") for n in range(80)]
    shared = make("http://host", *tasks, held_out_share=0.2)
    sizes = shared.size("train"), shared.size("held_out")
    assert sum(sizes) == 80
    assert 4 <= sizes[1] <= 28
    asked = {
        split: {
            asyncio.run(shared.example(split, i)).content["task"]["responses_create_params"]["input"]
            for i in range(shared.size(split))
        }  # type: ignore[index]
        for split in ("train", "held_out")
    }
    assert not asked["train"] & asked["held_out"]
    (tmp_path / "other.jsonl").write_text(json.dumps(task("held out")))
    separate = make("http://host", *tasks, held_out_path=str(tmp_path / "other.jsonl"))
    assert (separate.size("train"), separate.size("held_out")) == (80, 1)


@pytest.mark.parametrize(
    ("task", "remedy"),
    [
        ([], "line 2 has no responses_create_params with input and tools: ValidationError"),
        ({}, "line 2 has no .* KeyError: 'responses_create_params'"),
        ({"responses_create_params": {"input": 5}}, "line 2 has no .* at `\\$.input`"),
        ({"responses_create_params": {"input": "1", "tools": [{"type": "web_search"}]}}, "only functions"),
    ],
)
def test_a_wrong_task_is_named_by_its_line(make: Make, task: object, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as refused:
        make("http://host", TASK, task)
    assert refused.value.field == "rollout.prompts.path"


def test_wrong_settings_are_refused_by_name(make: Make) -> None:
    with pytest.raises(ConfigError, match="write http://HOST:PORT"):
        make("host:80")
    with pytest.raises(ConfigError, match="cannot be read"):
        make("http://host", held_out_path="missing.jsonl")
    with pytest.raises(ConfigError, match=r"give the \.jsonl file"):
        make("http://host", path="")
