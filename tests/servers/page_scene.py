"""A folder in which the commands of pages are run as a shell runs them, in an order, each once."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, NamedTuple

import patient

from tests.documentation.page_commands import Command

TOOLS = Path(sys.executable).parent
STAYS = {
    r"rollmill view|rollmill trainer .*--node 0": r"http://127\.0\.0\.1:\d+",
    r"rollmill trainer .*--node 1": "",
    r"(\S+/)?prefect worker start": r"Worker '.*' started!",
    r"\S+/python -m vllm": "Application startup complete",
    r"rollmill improve (?!.*--yes)": "paused until somebody approves it",
}
"""What runs until it is ended or approved: its test waits for this in its output, and leaves it running; empty: it prints nothing."""
FROM_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS")
OVER = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
FLOW_RUN = re.compile(r"flow-run/([0-9a-f-]{36})")
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
        before: what happens before a command.
        after: what happens between a command and the next one.
    """

    def __init__(
        self,
        folder: Path,
        commands: Iterable[Command],
        environment: Mapping[str, str],
        changes: Mapping[str, Mapping[str, str]],
        places: Mapping[str, str],
        before: Callable[["Scene", Command], None] | None = None,
        after: Callable[["Scene", Command, str], None] | None = None,
    ) -> None:
        self.folder, self._changes, self._places = folder, changes, dict(places)
        self._before, self._after = before, after
        # The make that runs the tests, with ARGS for them, is none of a page's make.
        outside = {name: value for name, value in environment.items() if name not in FROM_MAKE}
        self.environment = {**outside, "PATH": f"{TOOLS}:{os.environ['PATH']}"}
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
                if self._before:
                    self._before(self, each)
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

    def kill(self, command: Command, after_s: float) -> bool:
        """Start a command, and end it by SIGKILL after as many seconds; returns False if it ended before.

        Raises:
            AssertionError: it failed before; with what it printed.
        """
        with tempfile.TemporaryFile("w+") as printed, self._open(self.change(command), printed) as process:
            try:
                status = process.wait(after_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return True
            printed.seek(0)
            assert status == 0, f"{command}\n{printed.read()}"
            return False

    def change(self, command: Command) -> str:
        """The command as it is run here."""
        text = command.text
        for old, new in {**self._changes.get(command.page, {}), **self._changes[""]}.items():
            given = new.format(**self._places) if old in text else ""
            text = re.sub(rf"(?<![\w.]){re.escape(old)}(?!\w|\.\d)", lambda _, given=given: given, text)
        return text

    def _open(self, line: str, output: int | IO[str]) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _start(self, text: str, line: str) -> Outcome:
        process = self._open(line, subprocess.PIPE)
        words = [word for word in shlex.split(text) if not re.match(r"[A-Z_]+=", word)]
        for pattern, sign in STAYS.items():
            if re.match(pattern, " ".join(words)):
                self._running.append(process)
                return self._wait_for_sign(process, sign)
        try:
            output, _ = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return Outcome(process.returncode, output)

    def _wait_for_sign(self, process: "subprocess.Popen[str]", sign: str) -> Outcome:
        assert process.stdout
        output = ""
        for line in process.stdout if sign else ():
            output += line
            if re.search(sign, line):
                break
        else:
            if sign:
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


def finish_flow_runs(api: str, printed: str) -> None:
    """Wait until the flow runs whose pages a command has printed are completed; one that waits for a person is approved."""
    deadline = time.monotonic() + LONGEST_S
    for flow_run in dict.fromkeys(FLOW_RUN.findall(printed)):
        while (found := patient.get(f"{api}/flow_runs/{flow_run}").json())["state_type"] not in OVER:
            if found["state_type"] == "PAUSED":
                answer = {"approve": True, "approved_by": "ada", "note": ""}
                patient.post(f"{api}/flow_runs/{flow_run}/resume", json={"run_input": answer})
            assert time.monotonic() < deadline, found
            time.sleep(0.5)
        assert found["state_type"] == "COMPLETED", (printed, found["state"])
