"""A folder in which the commands of pages are run as a shell runs them, in an order, each once."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.documentation.page_commands import Command

TOOLS = Path(sys.executable).parent
STAYS = re.compile(r"(rollmill (view|trainer|vllm)|(\S+/)?prefect worker start|\S+/python -m vllm)\b")
"""What runs until it is ended: its test waits for SAYS_THAT_IT_RUNS and leaves it running."""
SAYS_THAT_IT_RUNS = re.compile(r"http://127\.0\.0\.1:\d+|Worker '.*' started!|Application startup complete")
SAYS_NOTHING = re.compile(r"--node 1\b")
"""Of what runs until it is ended, what prints nothing."""
LONGEST_S = 900.0
STOP_S = 120.0


class Outcome(NamedTuple):
    """What became of a command: its exit status, None while it runs on, and what it printed."""

    status: int | None
    output: str


class Scene:
    """Runs commands in a folder that has `.venv` and `.venv-vllm` as a clone has them.

    Args:
        changes: by page, or "" for all: words and numbers of commands, and those that replace them here.
        places: values of names in braces in these.
        after: what happens between a command and the next one.
    """

    def __init__(
        self,
        folder: Path,
        commands: Iterable[Command],
        environment: Mapping[str, str],
        changes: Mapping[str, Mapping[str, str]],
        places: Mapping[str, str],
        after: Callable[["Scene", Command, str], None] | None = None,
    ) -> None:
        self.folder, self._changes, self._places = folder, changes, dict(places)
        self._after = after
        self.environment = {**environment, "PATH": f"{TOOLS}:{os.environ['PATH']}"}
        self._commands, self._outcomes = list(commands), dict[str, Outcome]()
        self._running: list[subprocess.Popen[str]] = []
        for name in (".venv", ".venv-vllm"):
            (folder / name).symlink_to(TOOLS.parent.parent / name)

    def run(self, command: Command) -> Outcome:
        """The outcome of a command, run once; those before it run first, so that its test can be run alone.

        Raises:
            AssertionError: it failed; with what it printed.
        """
        for each in self._commands[: self._commands.index(command) + 1]:
            if (line := self.change(each)) not in self._outcomes:
                self._outcomes[line] = outcome = self._start(each.text, line)
                if self._after and not outcome.status:
                    self._after(self, each, outcome.output)
        outcome = self._outcomes[line]
        assert not outcome.status, f"{line}\n{outcome.output}"
        return outcome

    def prepare(self, line: str) -> None:
        """Run a line of shell that no page has, before a command or between two.

        Raises:
            AssertionError: it failed; with what it printed.
        """
        outcome = self._start(line, line)
        assert not outcome.status, f"{line}\n{outcome.output}"

    def change(self, command: Command) -> str:
        """The command as it is run here."""
        text = command.text
        for old, new in {**self._changes.get(command.page, {}), **self._changes[""]}.items():
            given = new.format(**self._places) if old in text else ""
            text = re.sub(rf"(?<![\w.]){re.escape(old)}(?!\w|\.\d)", lambda _, given=given: given, text)
        return text

    def _start(self, text: str, line: str) -> Outcome:
        process = subprocess.Popen(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        words = [word for word in shlex.split(text) if not re.match(r"[A-Z_]+=", word)]
        if STAYS.match(" ".join(words)):
            self._running.append(process)
            return self._wait_for_sign(process, SAYS_NOTHING.search(text) is None)
        try:
            output, _ = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return Outcome(process.returncode, output)

    def _wait_for_sign(self, process: "subprocess.Popen[str]", has_sign: bool) -> Outcome:
        assert process.stdout
        output = ""
        for line in process.stdout if has_sign else ():
            output += line
            if SAYS_THAT_IT_RUNS.search(line):
                break
        else:
            if has_sign:
                return Outcome(process.wait() or 1, f"{output}\nit ended")
        # A full pipe would hold it up.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        return Outcome(None, output)

    def end(self) -> None:
        """End what runs on."""
        for process in reversed(self._running):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._running:
            process.wait(timeout=STOP_S)
