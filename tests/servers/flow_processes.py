"""Flows of a test, one at a time, each in a process that can be killed."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rollmill.flows.configuration.config import RunConfig

DEADLINE_S = 300.0


class Runs:
    """Starts one flow at a time, in a child of a process that has imported everything."""

    def __init__(self, folder: Path, config: RunConfig, environment: dict[str, str]) -> None:
        settings = folder / "config.json"
        settings.write_text(config.model_dump_json())
        self.log = folder / "flows.log"
        script = Path(__file__).parents[1] / "flows" / "forked_runs.py"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(script), str(settings)],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def start(self, name: str, command: str = "run", overrides: Sequence[str] = ()) -> int:
        """Start or resume a run, with other settings for those in `overrides` (KEY=VALUE); returns the process's id."""
        assert self._process.stdin
        self._process.stdin.write(" ".join([command, name, *overrides]) + "\n")
        self._process.stdin.flush()
        while (line := self._line()) == "ready":
            pass
        return int(line)

    def ended(self) -> int:
        """Wait for its end; returns its status."""
        return int(self._line())

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)

    def _line(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline().strip()
        assert line, self.log.read_text()[-3000:]
        return line
