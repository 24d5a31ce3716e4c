"""The environment `shell`: commands in a sandbox that lasts as long as the episode, and whose end is graded."""

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.processes.supervisor import descendants
from rollmill.tasks.rollout.config import PromptsConfig, RolloutConfig
from rollmill.tasks.rollout.environment import Episode, Message, make_environment
from rollmill.tasks.rollout.environments.shell import SHOWN_CHARACTERS, ShellEpisode, describe
from rollmill.tasks.sandbox.config import SandboxConfig
from rollmill.tasks.sandbox.finished import Finished

CONFIG = RolloutConfig(environment="shell", sandbox=SandboxConfig(timeout_s=20.0))


def call(command: object, tool: str = "shell") -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': {'command': command}})}</tool_call>"


async def say(episode: Episode, said: str) -> list[str]:
    replies = await episode.reply([Message("user", ""), Message("assistant", said)])
    assert isinstance(replies, Sequence)
    assert all(each.role == "tool" for each in replies)
    return [each.content for each in replies]


async def begin(name: str, config: RolloutConfig = CONFIG) -> Episode:
    """An episode of the built-in task with this id."""
    environment = make_environment(config)
    for split in ("train", "held_out"):
        for index in range(environment.size(split)):
            example = await environment.example(split, index)
            if example.example_id == name:
                return environment.episode(example, 0)
    raise KeyError(name)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(descendants(os.getpid()))
    yield
    assert set(descendants(os.getpid())) <= before


@pytest.mark.sandbox
async def test_files_stay_between_turns_and_the_check_gives_the_reward() -> None:
    episode = await begin("sum-5")
    (opening,) = await episode.reply(())
    assert opening.content == "write the sum of the numbers in data.txt to answer.txt"
    assert await say(episode, call("cat data.txt | paste -sd+")) == ["1+2+3+4+5\n"]
    assert await say(episode, call("echo 1 > part; exit 3") + call("cat part")) == ["[exit status 3]", "1\n"]
    assert await say(episode, call("echo 15 > answer.txt")) == [""]
    assert await say(episode, "done") == []
    assert await episode.close() == {
        "reward": 1.0,
        "metrics": {"calls": 4, "failed_calls": 1, "stopped_calls": 0},
    }


@pytest.mark.sandbox
@pytest.mark.parametrize(
    "command", ["true", "echo 14 > answer.txt", "mkfifo answer.txt", "ln -s /dev/zero answer.txt"]
)
async def test_a_task_that_is_not_done_has_no_reward(command: str) -> None:
    config = CONFIG.model_copy(update={"sandbox": SandboxConfig(timeout_s=1.0)})
    episode = await begin("sum-5", config)
    await say(episode, call(command))
    assert (await episode.close())["reward"] == 0.0


@pytest.mark.sandbox
async def test_a_check_that_blocks_ends_before_the_limit_of_a_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollmill.tasks.rollout.environments.shell.CHECK_S", 0.2)
    episode = await begin("sum-5")
    await say(episode, call("mkfifo answer.txt"))
    async with asyncio.timeout(CONFIG.sandbox.timeout_s / 2):
        assert (await episode.close())["reward"] == 0.0


@pytest.mark.sandbox
async def test_an_episode_without_a_call_is_graded_too() -> None:
    assert (await (await begin("files-3")).close())["reward"] == 0.0


@pytest.mark.sandbox
async def test_a_task_is_set_up_before_an_answer_without_a_call_is_graded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollmill.tasks.rollout.environments.shell.CHECK_S", 1.0)
    task = {"problem": "do nothing", "setup": "sleep 1.5", "check": "sleep 0.3"}
    episode = ShellEpisode(task, CONFIG)
    assert await say(episode, "done") == []
    async with asyncio.timeout(1.4):
        assert (await episode.close())["reward"] == 1.0
    # Of an answer that was cut off, `reply` is not called; its check has the whole time, too.
    assert (await ShellEpisode(task, CONFIG).close())["reward"] == 1.0


@pytest.mark.sandbox
async def test_files_that_only_other_rows_have_are_not_compared() -> None:
    episode = ShellEpisode({"problem": "write", "files": {"x": "1\n", "y": None}}, CONFIG)
    await say(episode, call("echo 1 > x"))
    assert (await episode.close())["reward"] == 1.0


@pytest.mark.sandbox
async def test_every_built_in_task_can_be_done() -> None:
    answers = {
        "lines-4": "grep -c . log.txt",
        "sum-4": "paste -sd+ data.txt | (read x; echo $((x)))",
        "files-4": "ls box | grep -c .",
        "largest-4": "sort -n data.txt | tail -1",
        "line-4": "sed -n 4p words.txt",
    }
    for name, command in answers.items():
        episode = await begin(name)
        await say(episode, call(f"{command} > answer.txt"))
        assert (await episode.close())["reward"] == 1.0, name


@pytest.mark.sandbox
async def test_what_is_no_call_of_the_tool_is_answered() -> None:
    episode = await begin("sum-5")
    said = call("true", "python") + call(3) + '<tool_call>{"name": "shell", "arguments": {}}</tool_call>'
    unknown, number, missing = await say(episode, said)
    assert unknown == "error: there is no tool 'python', only shell"
    assert number == "error: command must be a text"
    assert missing == "error: missing a required argument: 'command'"
    await episode.close()


@pytest.mark.sandbox
@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("sleep 1000", "[stopped: it exceeded the limit of time]"),
        ("yes", "[stopped: it exceeded the limit of output]"),
        ("cat /etc/passwd", "[exit status 1]"),
        (":() { : | : & }; :; sleep 1000", "[stopped: it exceeded the limit of time]"),
        ("dd if=/dev/zero of=x bs=1M", "[exit status 1]"),
        ("seq 1000000 | split -l 1 -a 6", "[stopped: it exceeded the limit of files]"),
    ],
)
async def test_a_command_that_is_stopped_says_so_and_the_episode_is_a_row(command: str, shown: str) -> None:
    timeout_s = 1.5 if "time" in shown else 60.0
    config = CONFIG.model_copy(update={"sandbox": SandboxConfig(timeout_s=timeout_s)})
    episode = await begin("sum-5", config)
    (text,) = await say(episode, call(command))
    assert text.endswith(shown)
    assert len(text) < SHOWN_CHARACTERS + 200
    (after,) = await say(episode, call("echo alive"))
    assert after == (
        "error: not run: the sandbox has ended, since it had too many files"
        if "files" in shown
        else "alive\n"
    )
    outcome = await episode.close()
    assert outcome["reward"] == 0.0
    assert outcome["metrics"] == {
        "calls": 1 if "files" in shown else 2,
        "failed_calls": 1,
        "stopped_calls": int("stopped" in shown),
    }


@pytest.mark.sandbox
async def test_the_commands_of_one_message_share_the_time_of_a_call_of_the_environment() -> None:
    config = CONFIG.model_copy(update={"env_timeout_s": 1.5})
    episode = await begin("sum-5", config)
    slept, not_run = await say(episode, call("sleep 1000") + call("echo 1"))
    assert slept.endswith("[stopped: it exceeded the limit of time]")
    assert not_run == "error: not run: the commands before took too long"
    await episode.close()


TASKS = """\
{"prompt": "make a greeting", "setup": "echo hello > start", "check": "test -s greeting", "files": {"greeting": "hello\\n"}}
{"prompt": "say yes", "check": "grep -qx yes answer"}
"""


def own_tasks(folder: Path, *columns: str) -> RolloutConfig:
    path = folder / "tasks.jsonl"
    path.write_text(TASKS)
    prompts = PromptsConfig(
        path=str(path), held_out_path=str(path), answer_column="", columns=columns, system="Use the shell."
    )
    return CONFIG.model_copy(update={"prompts": prompts})


@pytest.mark.sandbox
@pytest.mark.parametrize(("command", "reward"), [("cp start greeting", 1.0), ("echo hi > greeting", 0.0)])
async def test_tasks_come_from_a_file_and_the_content_of_files_is_compared(
    tmp_path: Path, command: str, reward: float
) -> None:
    environment = make_environment(own_tasks(tmp_path, "setup", "check", "files"))
    assert environment.size("train") == 2
    episode = environment.episode(await environment.example("train", 0), 0)
    opening = await episode.reply(())
    assert opening == (Message("system", "Use the shell."), Message("user", "make a greeting"))
    await say(episode, call(command))
    assert (await episode.close())["reward"] == reward
    other = environment.episode(await environment.example("train", 1), 0)
    await say(other, call("echo yes > answer"))
    assert (await other.close())["reward"] == 1.0


def test_tasks_without_a_check_are_refused(tmp_path: Path) -> None:
    config = own_tasks(tmp_path, "setup")
    unsafe = config.model_copy(update={"sandbox": SandboxConfig(unsafe=True)})
    with pytest.raises(ConfigError, match="name the columns of a task's check") as raised:
        make_environment(unsafe)
    assert raised.value.field == "rollout.prompts.columns"


def test_a_long_output_is_shortened_in_the_middle() -> None:
    text = describe(Finished(0, b"a" * 3000 + b"b" * 3000, b""))
    assert text == f"{'a' * 2000}\n[2000 characters left out]\n{'b' * 2000}"
