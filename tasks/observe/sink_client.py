"""The sinks of a run as it sees them: it hands points over, and neither waits for them nor fails with them."""

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from tasks.observe.sinks import Point, SinkSettings

Say = Callable[[str], None]
"""Told what goes wrong, the first time for each sink."""
EXIT_GRACE_S = 5.0
"""Seconds the process has to end by itself, beyond those for what is left."""
MAX_LINE_BYTES = 1 << 20
REMEDY = (
    "the run goes on without; what it lacks it gets when it answers again, or when the run is gone on with, and all of it is "
    "in the data set `metrics`"
)


class Sinks(Protocol):
    """Takes a run's points.

    Attributes:
        n_failures: how often a sink could not take what was handed over.
    """

    n_failures: int

    def put(self, point: Point) -> None:
        """Hand a point over; one that a sink has already is not written again."""


@dataclass(slots=True)
class NoSinks:
    """Those of a run that has none."""

    n_failures: int = 0

    def put(self, point: Point) -> None:
        """Nothing happens."""


class SinkClient:
    """A process that has the sinks; an async context manager, which ends it.

    Args:
        settings: which sinks.
        say: told of the first failure of each sink.
        words: command line that starts the process, without its argument.
        remedy: said after what has failed.
    """

    def __init__(
        self,
        settings: SinkSettings,
        say: Say,
        words: tuple[str, ...] = (sys.executable, "-m", "tasks.observe.sink_process"),
        remedy: str = REMEDY,
    ) -> None:
        self._settings, self._say, self._words, self._remedy = settings, say, words, remedy
        self._process: asyncio.subprocess.Process | None = None
        self._reports = asyncio.TaskGroup()
        self._told: set[str] = set()
        self.n_failures = 0

    async def __aenter__(self) -> Self:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *self._words,
            json.dumps(asdict(self._settings)),
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.DEVNULL,
            limit=MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C is for the run, whose end this process sees by its input
        )
        await self._reports.__aenter__()
        self._reports.create_task(self._read(self._process))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say how the run ended, end the input, and wait for what is left, `timeout_s` at most."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        if not process.stdin.is_closing() and (error is None or isinstance(error, Exception)):
            self._write({"end": "failed" if error else "finished"})
        process.stdin.close()
        try:
            async with asyncio.timeout(self._settings.timeout_s + EXIT_GRACE_S):
                await process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
        await self._reports.__aexit__(None, None, None)
        if process.returncode:
            self._fail("sinks", f"their process ended with status {process.returncode}")

    def put(self, point: Point) -> None:
        """Hand a point over."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        if process.stdin.is_closing():
            self.n_failures += 1
            return
        self._write(asdict(point))

    def _write(self, values: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(values).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            report = json.loads(line)
            self._fail(report["sink"], f"{report['n_waiting']} points wait: {report['error']}")

    def _fail(self, sink: str, what: str) -> None:
        self.n_failures += 1
        if sink not in self._told:
            self._told.add(sink)
            self._say(f"{sink}: {what}\n{self._remedy}")
