"""The environment `shell`: tasks that the policy does with commands, in a sandbox that lasts as long as the episode."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cache
from typing import Self

from rollmill.tasks.errors import ConfigError, EpisodeError, SandboxError
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment import Episode, Example, Message, Split, select_split
from rollmill.tasks.rollout.environments.prompts import Prompts, messages_from_problem
from rollmill.tasks.rollout.tools import run_tool, tool_calls
from rollmill.tasks.sandbox.finished import Finished
from rollmill.tasks.sandbox.sandbox import Sandbox, check_sandbox, open_sandbox

FIELD = "rollout.sandbox"
TOOL = "shell"
SHELL = ("bash", "-c")
CHECKS = ("check", "files")
SHOWN_CHARACTERS = 4000
"""Characters of a command's output that the policy is shown: half of them from the beginning, half from the end."""
CHECK_S = 4.0
"""Seconds in which a task is checked: an episode has five to close (EpisodePlayer.cut_grace_s)."""
REPLY_SHARE = 0.8
"""Share of rollout.env_timeout_s that the commands of one message may take together."""


class Shell:
    """Environment with tasks in files and commands; the policy calls the tool `shell` and ends with a message without a call.

    The tasks are those of `rollout.prompts`, if that has a path, and a few simple ones otherwise. An example has `problem`, optionally
    `setup`, a command that is run first, and one or both of `check`, a command that succeeds if the task is done, and `files`, the
    content of files by path. The outcome has the reward, 1 or 0, for the scorer `environment`.
    """

    name = "shell"
    stop = ()
    tools: Sequence[Mapping[str, object]] = (
        {
            "type": "function",
            "function": {
                "name": TOOL,
                "description": "Run a command with bash. Files stay, processes and the working folder do not.",
                "parameters": {
                    "type": "object",
                    "properties": {"command": {"type": "string", "description": "The command."}},
                    "required": ["command"],
                },
            },
        },
    )

    def __init__(self, config: RolloutConfig, prompts: Prompts | None) -> None:
        self._config, self._prompts = config, prompts

    @classmethod
    def from_config(cls, config: RolloutConfig) -> Self:
        """Create the environment; raises ConfigError if this machine has no sandbox for these settings, or tasks have no check."""
        check_sandbox(FIELD, config.sandbox)
        if not config.prompts.path:
            return cls(config, None)
        if not set(CHECKS) & set(config.prompts.columns):
            remedy = "name the columns of a task's check: check (a command), files, or both, and setup if there is one"
            raise ConfigError("rollout.prompts.columns", list(config.prompts.columns), remedy)
        return cls(config, Prompts.from_config(config))

    def size(self, split: Split) -> int:
        return self._prompts.size(split) if self._prompts else len(_tasks(split))

    async def example(self, split: Split, index: int) -> Example:
        if self._prompts:
            return await self._prompts.example(split, index)
        return _tasks(split)[index]

    def episode(self, example: Example, seed: int) -> Episode:
        return ShellEpisode(example.content, self._config)


class ShellEpisode:
    """An episode with a sandbox, which starts at the first command, or at an answer without one."""

    def __init__(self, task: Mapping[str, object], config: RolloutConfig) -> None:
        self._task, self._config = task, config
        self._stack = AsyncExitStack()
        self._sandbox: Sandbox | None = None
        self._stopped = ""
        self._counts = {"calls": 0, "failed_calls": 0, "stopped_calls": 0}

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        if not messages:
            system = self._config.prompts.system
            opening = (Message("system", system),) if system else ()
            return (*opening, *messages_from_problem(self._task["problem"]))
        deadline = time.monotonic() + REPLY_SHARE * self._config.env_timeout_s

        async def shell(command: str) -> str:
            return await self._call(command, deadline)

        calls = tool_calls(messages[-1].content)
        if not calls:
            # The check needs the task to be set up, for which `close` may have too little time.
            await self._open()
        return [
            Message("tool", await run_tool(shell, call), name=call.name)
            if call.name == TOOL
            else Message("tool", f"error: there is no tool {call.name!r}, only {TOOL}", name=TOOL)
            for call in calls
        ]

    async def close(self) -> Mapping[str, object]:
        async with self._stack:
            try:
                is_done = await self._is_done()
            except SandboxError as error:
                return {"error": str(error), "metrics": self._counts}
        return {"reward": float(is_done), "metrics": self._counts}

    async def _call(self, command: str, deadline: float) -> str:
        """Run a command of the policy and return what it is shown."""
        left_s = deadline - time.monotonic()
        if not isinstance(command, str):
            return "error: command must be a text"
        if self._stopped or left_s <= 0:
            return f"error: not run: {self._stopped or 'the commands before took too long'}"
        sandbox = await self._open()
        done = await sandbox.run([*SHELL, command], b"", left_s)
        self._counts["calls"] += 1
        self._counts["failed_calls"] += not done.has_succeeded
        self._counts["stopped_calls"] += bool(done.stopped_by)
        if done.stopped_by == "files":
            self._stopped = "the sandbox has ended, since it had too many files"
        return describe(done)

    async def _open(self) -> Sandbox:
        """Return the sandbox; the first time it starts, and the task is set up."""
        if self._sandbox is None:
            self._sandbox = await self._stack.enter_async_context(open_sandbox(FIELD, self._config.sandbox))
            if setup := self._task.get("setup"):
                done = await self._sandbox.run([*SHELL, str(setup)])
                if not done.has_succeeded:
                    raise EpisodeError(f"the task cannot be set up with {setup!r:.200}: {describe(done)}")
        return self._sandbox

    async def _is_done(self) -> bool:
        """Return True if the task's check succeeds and all its files have their content, within CHECK_S seconds."""
        if self._stopped:
            return False
        sandbox, check, files = await self._open(), self._task.get("check"), self._task.get("files")
        deadline = time.monotonic() + CHECK_S

        async def run(*command: str) -> Finished:
            # What the policy left may block, such as a named pipe in place of a file.
            return await sandbox.run(command, b"", max(0.1, deadline - time.monotonic()))

        if check and not (await run(*SHELL, str(check))).has_succeeded:
            return False
        expected = json.loads(files) if isinstance(files, str) else files
        for path, content in (expected if isinstance(expected, Mapping) else {}).items():
            if content is None:
                # Typed columns have nulls for the files of other rows.
                continue
            done = await run("cat", "--", path)
            if not done.has_succeeded or done.stdout != str(content).encode():
                return False
        return True


def describe(done: Finished) -> str:
    """Return what the policy is shown of a command: its output, shortened in the middle, and how it ended if not with status 0."""
    text = (done.stdout + done.stderr).decode(errors="replace")
    if len(text) > SHOWN_CHARACTERS:
        half = SHOWN_CHARACTERS // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    if done.stopped_by:
        return f"{text}\n[stopped: it exceeded the limit of {done.stopped_by}]".lstrip("\n")
    return f"{text}\n[exit status {done.status}]".lstrip("\n") if done.status else text


@cache
def _tasks(split: Split) -> tuple[Example, ...]:
    """Return the built-in tasks of a split: five kinds with twelve numbers each, one in five held out."""
    found: dict[str, tuple[str, str, object]] = {}
    for n in range(3, 15):
        found |= {
            f"lines-{n}": ("the number of lines of log.txt", f"seq {n} {3 * n} > log.txt", 2 * n + 1),
            f"sum-{n}": ("the sum of the numbers in data.txt", f"seq {n} > data.txt", n * (n + 1) // 2),
            f"files-{n}": ("the number of files in the folder box", f"mkdir box; touch box/{{1..{n}}}", n),
            f"largest-{n}": ("the largest number in data.txt", f"seq {7 * n} | shuf > data.txt", 7 * n),
            f"line-{n}": (f"line {n} of words.txt", "printf 'w%s\\n' {1..20} > words.txt", f"w{n}"),
        }
    examples = {
        name: Example(
            name,
            {
                "problem": f"write {what} to answer.txt",
                "setup": setup,
                "check": f'[ "$(cat answer.txt)" = "{answer}" ]',
            },
        )
        for name, (what, setup, answer) in found.items()
    }
    return select_split(examples, split)
