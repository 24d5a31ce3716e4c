"""Programs of others play episodes: unchanged clients of OpenAI and Anthropic against the policy's endpoint."""

import asyncio
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from agents import TEXT_AGENTS, TOOL_AGENTS
from aiohttp import ClientSession, web
from answering_sampler import Answering

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer, save_character_tokenizer
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment import Example, TokenCounts
from rollmill.tasks.rollout.environments.agent import Agent
from rollmill.tasks.rollout.environments.endpoint.chat_wire import (
    Said,
    Wire,
    leave_sampling_to_the_run,
    refuse_sampling_settings,
)
from rollmill.tasks.rollout.environments.endpoint.policy_endpoint import PolicyEndpoint
from rollmill.tasks.rollout.episode import EpisodePlayer, SampledTokens
from rollmill.tasks.rollout.trajectory import Trajectory, TrajectoryRequest

TEMPLATE = """
{%- if tools %}{{ '(tools)' + tools | map(attribute='function') | map(attribute='name') | join(',') + '|' }}{% endif %}
{%- for message in messages %}{{ '(' + message.role + ')' + message.content + '<eos>|' }}{% endfor %}
{%- if add_generation_prompt %}{{ '(assistant)' }}{% endif %}
"""
EXAMPLES = Path(__file__).parents[2] / "conf" / "agents"


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    folder = save_character_tokenizer(tmp_path / "tokenizer")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return ChatTokenizer.load(folder)


def make_agent(command: str = "", **settings: str) -> Agent:
    agent = {"command": command, "problems": "addition", **settings}
    return Agent.from_config(RolloutConfig.model_validate({"environment": "agent", "agent": agent}))


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that gives the command of a script."""

    def write(script: str) -> str:
        (tmp_path / "script.py").write_text(script)
        return shlex.join([sys.executable, str(tmp_path / "script.py")])

    return write


async def play(
    tokenizer: ChatTokenizer, environment: Agent, said: Sequence[str], timeout_s: float = 120.0
) -> tuple[Trajectory, Answering]:
    sampler = Answering(tokenizer, said)
    player = EpisodePlayer(environment, tokenizer, sampler, 512, timeout_s)
    return await player.play(make_work()), sampler


def make_work() -> TrajectoryRequest:
    return TrajectoryRequest("r.0.0.0", 0, 0, 0, Example("47+38", {"problem": "47+38="}), 3, 1.0)


def joined(trajectory: Trajectory) -> list[tuple[str, str]]:
    return [(each.role, each.content) for each in trajectory.messages]


@pytest.mark.slow
@pytest.mark.parametrize("agent", TEXT_AGENTS)
async def test_an_unchanged_client_plays_two_turns_whose_tokens_are_those_that_were_sampled(
    tokenizer: ChatTokenizer, run_python: Callable[[str], str], agent: str
) -> None:
    trajectory, sampler = await play(tokenizer, make_agent(run_python(TEXT_AGENTS[agent])), ["85", "86"])
    assert (trajectory.error, trajectory.status) == ("", "complete")
    said = [("user", "47+38="), ("assistant", "85"), ("user", "+1?"), ("assistant", "86")]
    assert joined(trajectory) == said
    assert trajectory.outcome == {"output": "86\n"}
    assert len(trajectory.segments) == 1
    # The endpoint's last request had all tokens that were sampled before, bit for bit.
    given, sampled = sampler.calls[1]
    assert trajectory.token_ids.tolist() == [*given, *sampled]
    assert given[: len(sampler.calls[0][0]) + 3] == [*sampler.calls[0][0], *sampler.calls[0][1]]
    assert trajectory.loss_mask.sum() == 6


@pytest.mark.slow
@pytest.mark.parametrize("agent", [*TOOL_AGENTS, "pydantic-ai"])
async def test_tools_of_a_program_are_in_the_prompt_and_its_answers_follow_the_sampled_call(
    tokenizer: ChatTokenizer, run_python: Callable[[str], str], agent: str
) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 47, "b": 38}}</tool_call>'
    known = call.replace('"', "?").replace("{", "(").replace("}", ")").replace("_", "-")
    example = (EXAMPLES / "pydantic_ai_agent.py").read_text()
    environment = make_agent(run_python(TOOL_AGENTS.get(agent, example)))

    # The characters of a call, which the tokenizer lacks.
    decoded = ChatTokenizer.decode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ChatTokenizer, "decode", lambda self, ids: decoded(self, ids).replace(known, call), raising=True
        )
        trajectory, sampler = await play(tokenizer, environment, [known, "85"])
    assert (trajectory.error, trajectory.status) == ("", "complete")
    assert joined(trajectory) == [
        ("user", "47+38="),
        ("assistant", call),
        ("tool", "85"),
        ("assistant", "85"),
    ]
    assert tokenizer.decode(np.array(sampler.calls[0][0])).startswith("(tools)add|(user)47+38=")
    assert len(trajectory.segments) == 1
    assert trajectory.token_ids.tolist() == [*sampler.calls[1][0], *sampler.calls[1][1]]


async def test_a_shell_script_with_curl_plays_a_turn(tokenizer: ChatTokenizer) -> None:
    trajectory, _ = await play(tokenizer, make_agent(f"bash {EXAMPLES / 'ask.sh'}"), ["85"])
    assert (trajectory.error, trajectory.status) == ("", "complete")
    assert joined(trajectory) == [("user", "47+38="), ("assistant", "85")]
    assert '"content": "85"' in str(trajectory.outcome["output"])


REWRITING = """
import json, os, sys, urllib.request
def ask(path, body, key=None):
    headers = {"Authorization": "Bearer " + (key or os.environ["OPENAI_API_KEY"]), "Content-Type": "application/json"}
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(asked))
def chat(*messages, **further):
    said = ask("/chat/completions", {"messages": [{"role": "user", "content": each} for each in messages], **further})
    return said["choices"][0]["message"]["content"]
"""


async def test_a_conversation_that_does_not_continue_begins_a_segment(
    tokenizer: ChatTokenizer, run_python: Callable[[str], str]
) -> None:
    script = REWRITING + 'chat("1+1="), chat("2+2="), chat("2+2=")'
    trajectory, sampler = await play(tokenizer, make_agent(run_python(script)), ["2", "4", "5"])
    assert (trajectory.error, trajectory.status) == ("", "complete")
    assert len(trajectory.segments) == 3
    assert trajectory.loss_mask.sum() == 6
    # The same conversation again has another seed.
    assert len(set(sampler.seeds)) == 3


async def test_the_key_names_the_episode_whatever_session_a_client_has() -> None:
    async def ask(request: Wire) -> Said:
        return Said({"role": "assistant", "content": "2"}, TokenCounts(4, 2))

    headers = {"Authorization": "Bearer key", "X-Session-ID": "of the client"}
    async with PolicyEndpoint() as endpoint, ClientSession(headers=headers) as client:
        endpoint.asked["key"] = ask
        async with client.post(f"{endpoint.url}/v1/chat/completions", json={"messages": [USER]}) as answer:
            assert answer.status == 200, await answer.text()


async def test_a_program_may_continue_after_a_refused_request_and_one_that_asks_for_nothing_special(
    tokenizer: ChatTokenizer, run_python: Callable[[str], str]
) -> None:
    script = REWRITING + (
        "for wrong in ({'n': 2}, {'stop': ['x']}, {'user': 'x' * (3 << 20)}):\n"
        "    try: chat('1+1=', **wrong)\n    except urllib.error.HTTPError: continue\n    sys.exit('answered')\n"
        "plain = {'logprobs': False, 'stop': [], 'response_format': {'type': 'text'}, 'logit_bias': {}, 'min_p': 0.1}\n"
        "print(chat('1+1=', **plain))"
    )
    trajectory, _ = await play(tokenizer, make_agent(run_python(script)), ["2"])
    assert (trajectory.error, trajectory.status, trajectory.outcome) == ("", "complete", {"output": "2\n"})


async def test_a_truncated_episode_stays_truncated_if_its_program_does_not_end(
    tokenizer: ChatTokenizer, run_python: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmill.tasks.rollout.environments.endpoint.requesting_episode.CLOSE_S", 0.2)
    script = REWRITING + (
        "import time\nchat('1+1=')\ntry: chat('1+1=', 'x' * 90)\nexcept OSError: time.sleep(600)"
    )
    sampler = Answering(tokenizer, ["2"])
    player = EpisodePlayer(make_agent(run_python(script)), tokenizer, sampler, 90, 60.0)
    trajectory = await player.play(make_work())
    assert (trajectory.error, trajectory.status) == ("", "truncated")


async def test_requests_at_the_same_time_are_answered_one_after_the_other(
    tokenizer: ChatTokenizer, run_python: Callable[[str], str]
) -> None:
    script = REWRITING + (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(8) as pool: print(sorted(pool.map(chat, [f'{i}+{i}=' for i in range(8)])))"
    )
    trajectory, _ = await play(tokenizer, make_agent(run_python(script)), list("01234567"))
    assert (trajectory.error, trajectory.status) == ("", "complete")
    assert trajectory.outcome["output"] == f"{list('01234567')}\n"
    assert trajectory.loss_mask.sum() == 16


async def test_a_client_that_gives_up_and_asks_again_gets_a_new_answer(
    tokenizer: ChatTokenizer, run_python: Callable[[str], str]
) -> None:
    class Slow(Answering):
        """Answers its first request after the client has given up, and the others at once."""

        async def sample(self, *arguments: Any, **further: Any) -> SampledTokens:
            if not self.calls:
                await asyncio.sleep(2.0)
            return await super().sample(*arguments, **further)

    script = REWRITING.replace("urlopen(asked)", "urlopen(asked, timeout=patience)") + (
        "patience = 0.5\ntry: chat('1+1=')\nexcept TimeoutError: patience = 60\nprint(chat('1+1='))"
    )
    player = EpisodePlayer(make_agent(run_python(script)), tokenizer, Slow(tokenizer, ["2", "3"]), 512, 60.0)
    trajectory = await player.play(make_work())
    assert (trajectory.error, trajectory.status, trajectory.outcome) == ("", "complete", {"output": "3\n"})
    assert joined(trajectory) == [("user", "1+1="), ("assistant", "2"), ("assistant", "3")]
    assert trajectory.loss_mask.sum() == 4


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("print(5)", "the agent ended without a request to the endpoint; its output: '5"),
        (REWRITING + "chat('1+1='); sys.exit('no such file')", "exit status 1: no such file"),
        (REWRITING + "chat('1+1=', n=2)", "a request has n = 2; only `rollout` and `serve` set"),
        (REWRITING + "chat('1+1=', stop=['x'])", "a request has stop"),
        (
            REWRITING + "ask('/chat/completions', {'messages': 5})",
            "Expected `array`, got `int` - at `$.messages`",
        ),
        (REWRITING + "ask('/chat/completions', {'messages': []})", "length >= 1 - at `$.messages`"),
        (
            REWRITING + "ask('/chat/completions', 5)",
            "the request is no JSON object: Expected `object`, got `int`",
        ),
        (REWRITING + "ask('/chat/completions', {}, key='other')", "no episode is open for this API key"),
        (REWRITING + "ask('/responses', {'input': [5]})", "Expected `object`, got `int` - at `$.input[0]`"),
        (
            REWRITING + "ask('/responses', {'input': '1+1=', 'previous_response_id': 'resp_1'})",
            "no response 'resp_1' was given",
        ),
        (
            REWRITING + "ask('/messages', {'messages': [{'role': 'user', 'content': 5}]})",
            "is no text and no list of blocks",
        ),
    ],
)
async def test_what_a_program_does_wrong_fails_its_trajectory_with_the_reason(
    tokenizer: ChatTokenizer, run_python: Callable[[str], str], script: str, error: str
) -> None:
    trajectory, _ = await play(tokenizer, make_agent(run_python(script)), ["2"])
    assert (trajectory.status, trajectory.error_type) == ("failed", "EpisodeError")
    assert error in trajectory.error


@pytest.mark.slow
async def test_a_program_that_kills_its_supervisor_fails_at_once_and_says_so(
    tokenizer: ChatTokenizer, tmp_path: Path, run_python: Callable[[str], str]
) -> None:
    script = REWRITING + (
        "import subprocess, time\nchat('1+1=')\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\nos.kill(os.getppid(), 9)\ntime.sleep(600)"
    )
    trajectory, _ = await play(tokenizer, make_agent(run_python(script)), ["2"])
    psutil.Process(int((tmp_path / "pid").read_text())).kill()
    assert (trajectory.status, trajectory.error_type) == ("failed", "EpisodeError")
    assert "the agent's supervisor was ended by signal 9" in trajectory.error


async def test_a_proxy_is_not_between_a_program_and_the_endpoint(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "other.host")
    trajectory, _ = await play(tokenizer, make_agent(f"bash {EXAMPLES / 'ask.sh'}"), ["85"])
    assert (trajectory.error, trajectory.status) == ("", "complete")


@pytest.mark.slow
async def test_what_a_program_leaves_running_ends_with_its_episode(
    tokenizer: ChatTokenizer, tmp_path: Path, run_python: Callable[[str], str]
) -> None:
    script = REWRITING + (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\nprint(chat('1+1='))"
    )
    trajectory, _ = await play(tokenizer, make_agent(run_python(script)), ["2"])
    assert (trajectory.error, trajectory.status, trajectory.outcome) == ("", "complete", {"output": "2\n"})
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("is_silent", [True, False])
async def test_a_deadline_ends_the_program_and_what_it_started(
    tokenizer: ChatTokenizer, run_python: Callable[[str], str], tmp_path: Path, *, is_silent: bool
) -> None:
    ask = "" if is_silent else 'chat("1+1=")\n'
    script = REWRITING + (
        f"{ask}import signal, subprocess, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\ntime.sleep(600)"
    )
    trajectory, _ = await play(tokenizer, make_agent(run_python(script)), ["2"], timeout_s=4.0)
    assert (trajectory.status, trajectory.error_type) == ("cancelled", "Deadline")
    assert trajectory.loss_mask.sum() == (0 if is_silent else 2)
    pids = [int(each) for each in (tmp_path / "pids").read_text().split()]
    assert not [
        each for each in pids if psutil.pid_exists(each) and psutil.Process(each).status() != "zombie"
    ]


async def test_a_service_plays_an_episode(tokenizer: ChatTokenizer) -> None:
    async def run(request: web.Request) -> web.Response:
        given = await request.json()
        headers = {"Authorization": f"Bearer {given['api_key']}"}
        async with (
            ClientSession(headers=headers) as client,
            client.post(
                f"{given['base_url']}/chat/completions", json={"messages": given["messages"]}
            ) as said,
        ):
            return web.Response(text=(await said.json())["choices"][0]["message"]["content"])

    application = web.Application()
    application.add_routes([web.post("/run", run), web.post("/fail", fail)])
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    try:
        trajectory, _ = await play(tokenizer, make_agent(url=f"http://{host}:{port}/run"), ["85"])
        failed, _ = await play(tokenizer, make_agent(url=f"http://{host}:{port}/fail"), ["85"])
    finally:
        await runner.cleanup()
    assert (trajectory.error, trajectory.status, trajectory.outcome) == ("", "complete", {"output": "85"})
    assert joined(trajectory) == [("user", "47+38="), ("assistant", "85")]
    assert failed.error.endswith("/fail answered 503: no room")
    gone, _ = await play(tokenizer, make_agent(url=f"http://{host}:{port}/run"), ["85"])
    assert "no answer from rollout.agent.url" in gone.error


async def fail(_: web.Request) -> web.Response:
    return web.Response(status=503, text="no room")


@pytest.mark.parametrize(
    ("settings", "field", "remedy"),
    [
        ({}, "rollout.agent.command", "give either a command or rollout.agent.url"),
        ({"command": "true", "url": "http://host"}, "rollout.agent.command", "give either"),
        ({"command": "no-such-program"}, "rollout.agent.command", "its program is not found"),
        ({"command": "echo 'one"}, "rollout.agent.command", "cannot be split into words"),
        (
            {"command": "true", "problems": "agent"},
            "rollout.agent.problems",
            "name the environment whose problems",
        ),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, str], field: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as refused:
        make_agent(**settings)
    assert refused.value.field == field


async def test_a_program_gets_no_secret_of_the_run(
    tokenizer: ChatTokenizer, run_python: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUB_TOKEN", "hidden")
    monkeypatch.setenv("OPENAI_API_KEY", "the user's")
    script = REWRITING + "chat('1+1='); print(json.dumps(sorted(os.environ)), os.environ['OPENAI_API_KEY'])"
    trajectory, _ = await play(tokenizer, make_agent(run_python(script)), ["2"])
    assert "HUB_TOKEN" not in str(trajectory.outcome)
    assert "the user's" not in str(trajectory.outcome)
    assert "rollmill-" in str(trajectory.outcome)


USER = {"role": "user", "content": "1+1="}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]}),
        ("chat/completions", {"messages": [{"content": "5"}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}),
        ("chat/completions", {"messages": [USER, {"role": "tool", "content": "5", "tool_call_id": [1]}]}),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}),
        ("chat/completions", {"messages": [USER], "tools": 5}),
        ("chat/completions", {"messages": [USER], "tools": [{"type": "function"}]}),
        ("chat/completions", {"messages": [USER], "response_format": {"type": "json_object"}}),
        ("chat/completions", b"[" * 200_000),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
        ("chat/completions", b"\xff"),
        ("responses", {}),
        ("responses", {"input": "1", "text": "abc"}),
        ("responses", {"input": "1", "previous_response_id": [1]}),
        ("responses", {"input": "1", "tools": 5}),
        ("responses", {"input": "1", "tools": [{"type": "web_search"}]}),
        ("responses", {"input": "1", "instructions": 5}),
        ("responses", {"input": [{"role": "user", "content": 5}]}),
        ("responses", {"input": [{"type": "function_call_output", "output": "5", "call_id": 5}]}),
        ("responses", {"input": [{"type": "function_call"}]}),
        ("messages", {"messages": 5}),
        ("messages", {"messages": [{"role": "system", "content": "5"}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        ("messages", {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": 5}]}]}),
        ("messages", {"messages": [USER], "tools": [5]}),
        ("messages", {"messages": [USER], "tools": [{"type": "bash_20250124", "name": "bash"}]}),
        ("messages", {"messages": [USER], "tool_choice": {"type": "any"}}),
        ("messages", {"messages": [USER], "stop_sequences": ["x"]}),
    ],
)
async def test_a_request_that_cannot_be_answered_is_refused_and_the_next_one_is_answered(
    path: str, body: object
) -> None:
    async def ask(request: Wire) -> Said:
        refuse_sampling_settings(leave_sampling_to_the_run(request))
        return Said({"role": "assistant", "content": "2"}, TokenCounts(4, 2))

    data = body if isinstance(body, bytes) else json.dumps(body)
    async with PolicyEndpoint() as endpoint, ClientSession(headers={"x-api-key": "key"}) as client:
        endpoint.asked["key"] = ask
        async with client.post(f"{endpoint.url}/v1/{path}", data=data) as answer:
            assert answer.status == 400, await answer.text()
            assert endpoint.refusal in (await answer.json())["error"]["message"]
        good = {"input": "1+1="} if path == "responses" else {"messages": [USER]}
        async with client.post(f"{endpoint.url}/v1/{path}", json=good) as answer:
            assert answer.status == 200, await answer.text()


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("chat/completions", ("prompt_tokens", "completion_tokens")),
        ("responses", ("input_tokens", "output_tokens")),
        ("messages", ("input_tokens", "output_tokens")),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_answers_have_the_true_token_counts(
    tokenizer: ChatTokenizer,
    run_python: Callable[[str], str],
    path: str,
    names: tuple[str, str],
    *,
    streams: bool,
) -> None:
    asked = (
        "{'input': '1+1='}" if path == "responses" else "{'messages': [{'role': 'user', 'content': '1+1='}]}"
    )
    # Without it, a chat stream has no counts.
    options = {"stream_options": {"include_usage": True}} if path == "chat/completions" and streams else {}
    script = REWRITING.replace(
        "return json.load(urllib.request.urlopen(asked))", "return urllib.request.urlopen(asked).read()"
    ) + (
        f"events = ask('/{path}', {{**{asked}, 'stream': {streams}, **{options}}}).decode().split('data: ')[{int(streams)}:]\n"
        "found = [json.loads(each.split('\\n\\n')[0]) for each in events if not each.startswith('[DONE]')]\n"
        "usages = [(each.get('message') or each.get('response') or each).get('usage') for each in found]\n"
        "usages += [each.get('usage') for each in found]\n"
        f"print(*(max(each[name] for each in usages if each) for name in {names}))"
    )
    trajectory, sampler = await play(tokenizer, make_agent(run_python(script)), ["22"])
    assert (trajectory.error, trajectory.status) == ("", "complete")
    ((given, sampled),) = sampler.calls
    assert trajectory.outcome == {"output": f"{len(given)} {len(sampled)}\n"}
    assert (len(given), len(sampled)) == (len("(user)1+1=|(assistant)") + 1, len("22") + 1)
