"""The sinks of a run as it sees them: it sends points, and neither waits for them nor fails with them."""

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Self

from rollmill.tasks.errors import ServiceError, WorkerError
from rollmill.tasks.observe.sinks.metric_sinks import Point, SinkSettings
from rollmill.tasks.processes.python_child import python_command
from rollmill.tasks.user_code.worker_process import WorkerProcess

Say = Callable[[str], None]
"""Prints what goes wrong, the first time for each sink."""
SINK_COMMAND = tuple(python_command("rollmill.tasks.observe.sinks.sink_process"))
REMEDY = (
    "the run continues; the sink gets the missing points when it answers again, or when the run is resumed; all points are "
    "in the data set `metrics`"
)


class SinkClient:
    """Client of a separate process that writes to the sinks; leaving it as an async context manager ends the process.

    `say` prints the first failure of each sink, followed by `remedy`.

    Attributes:
        n_failures: how often a sink could not take a point.
    """

    def __init__(
        self,
        settings: SinkSettings,
        say: Say,
        command: Sequence[str] = SINK_COMMAND,
        remedy: str = REMEDY,
    ) -> None:
        self._settings, self._say, self._command, self._remedy = settings, say, command, remedy
        self._reported: set[str] = set()
        self.n_failures = 0

    async def __aenter__(self) -> Self:
        self._process = await WorkerProcess.start(
            "their process",
            self._command,
            json.dumps(asdict(self._settings)).encode(),
            log=Path(os.devnull),
            stop_grace_s=self._settings.timeout_s,
        )
        return self

    async def __aexit__(self, _: object, error: BaseException | None, *__: object) -> None:
        """Send how the run ended, and wait until the process has written the remaining points, `timeout_s` at most."""
        if error is None or isinstance(error, Exception):
            self._send({"end": "failed" if error else "finished"})
        with suppress(WorkerError):
            # A process that is still starting does not ignore SIGTERM yet, which would end it before it has written anything.
            await self._process.wait_until_ready(self._settings.timeout_s)
        try:
            await self._process.stop()
        except ServiceError as stuck:
            self._fail("sinks", str(stuck))
        if self._process.returncode:
            self._fail("sinks", f"their process {self._process.ended.result()}")

    def put(self, point: Point) -> None:
        """Send a point; one that a sink has already is not written again, unless it is new."""
        self._send(asdict(point))

    def _send(self, values: dict[str, object]) -> None:
        self._process.send(json.dumps(values).encode()).add_done_callback(self._note_answer)

    def _note_answer(self, answer: asyncio.Future[bytes]) -> None:
        if answer.cancelled():
            # The event loop ends.
            return
        if isinstance(error := answer.exception(), WorkerError):
            self._fail("sinks", str(error))
            return
        for sink, n_waiting, text in json.loads(answer.result()):
            self._fail(sink, f"{n_waiting} points wait: {text}")

    def _fail(self, sink: str, what: str) -> None:
        self.n_failures += 1
        if sink not in self._reported:
            self._reported.add(sink)
            self._say(f"{sink}: {what}\n{self._remedy}")
