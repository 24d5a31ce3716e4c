"""`rollmill run` under a service manager: the same command is started again whenever it fails, and its steps are timed."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

import psutil

from benchmarks.kills.services import RESTART_DELAY_S

ENDED_STEP = re.compile(r"^step (\d+) \(\d+ of \d+\): ")
STARTED_AT = re.compile(r"^resuming at step|weights travel by")
MAX_FAILURES_IN_A_ROW = 5
END_TIMEOUT_S = 30.0
"""Seconds within which all processes of a killed flow have ended."""


class Moment(NamedTuple):
    """When a step was reported."""

    step: int
    at_s: float


class RunFailedError(Exception):
    """The command failed again and again without finishing a step."""


class ManagedRun:
    """One run, whose command is started again until it succeeds.

    Attributes:
        steps: each step's end as the run reported it, in order, by `time.monotonic`.
        starts: when the command was started.
        ready: when trainer and servers had the run's weights, once a start.
        statuses: exit status of each start that has ended.
        left: command lines of processes that outlived a dead flow by END_TIMEOUT_S.
    """

    def __init__(self, words: Sequence[str], folder: Path, log: Path, environment: dict[str, str]) -> None:
        self._command = [str(Path(sys.executable).parent / "rollmill"), *words]
        self._folder, self._log = folder, log
        self._environment = os.environ | environment
        self.steps: list[Moment] = []
        self.starts: list[float] = []
        self.ready: list[float] = []
        self.statuses: list[int] = []
        self.left: list[str] = []
        self.is_over = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._is_stopped = False
        self._manager = threading.Thread(target=self._manage, daemon=True)
        self._manager.start()

    @property
    def pid(self) -> int:
        """Process id of the flow; 0 while none runs."""
        process = self._process
        return process.pid if process and process.poll() is None else 0

    def check(self) -> None:
        """Raise RunFailedError if the run was given up."""
        if self.is_over.is_set() and self.statuses[-1]:
            raise RunFailedError(f"status {self.statuses[-1]}; {self._log}:\n{self._log.read_text()[-3000:]}")

    def stop(self) -> None:
        """End the run if it is not over."""
        self._is_stopped = True
        if self.pid and self._process:
            self._process.terminate()
        self._manager.join()

    def _manage(self) -> None:
        failures, n_steps = 0, 0
        while True:
            self._run_once()
            failures = failures + 1 if len(self.steps) == n_steps else 0
            n_steps = len(self.steps)
            if not self.statuses[-1] or failures > MAX_FAILURES_IN_A_ROW or self._is_stopped:
                self.is_over.set()
                return
            time.sleep(RESTART_DELAY_S)

    def _run_once(self) -> None:
        self.starts.append(time.monotonic())
        self._process = subprocess.Popen(
            self._command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._process.stdout
        # Processes that the flow started hold its output open after it.
        reading = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        reading.start()
        status = self._process.wait()
        if not status:
            reading.join()
        self.statuses.append(status)

    def _read(self, output: IO[str]) -> None:
        is_ready = False
        with self._log.open("a") as log:
            for line in output:
                now = time.monotonic()
                log.write(f"{now:.2f} {line}")
                log.flush()
                if found := ENDED_STEP.match(line):
                    self.steps.append(Moment(int(found[1]), now))
                elif not is_ready and STARTED_AT.search(line):
                    is_ready = True
                    self.ready.append(now)


def watch_end(run: ManagedRun, processes: Sequence[psutil.Process]) -> None:
    """Note in `run.left` which of a killed flow's processes, itself not included, still live END_TIMEOUT_S later."""
    _, alive = psutil.wait_procs(processes, END_TIMEOUT_S)
    for each in alive:
        try:
            run.left.append(" ".join(each.cmdline()))
        except psutil.NoSuchProcess:
            # It ended just now.
            continue
