"""HTTP client of a trainer's control API; raises the trainer's errors under their own types and keeps its ranks' spans."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from rollmill.tasks import errors
from rollmill.tasks.errors import NothingLoadedError, RequestError, ServiceDiedError, TransientRequestError
from rollmill.tasks.observe.retries import Retries
from rollmill.tasks.observe.spans import Span, add_spans, shift_spans
from rollmill.tasks.processes.launched_process import LaunchedProcess
from rollmill.tasks.serve.http_connection import Body, ServiceClient, wait_for_start
from rollmill.tasks.sync.weight_messages import (
    FIRST_RANK,
    ProgressCallback,
    SendResult,
    SendTarget,
    WeightOffer,
)
from rollmill.tasks.train.service.answers import OperationState, TrainerHealth
from rollmill.tasks.train.service.commands import (
    Answer,
    Command,
    ComputeLogprobs,
    OfferWeights,
    SendWeights,
    Shutdown,
    StopSending,
    decode_answer,
    encode_command,
)
from rollmill.tasks.train.service.rank_spans import IDLE, command_starts

_RAISED_AS_THEMSELVES = {
    *("BatchRefusedError", "StoreError", "LeaseLostError", "SchemaError", "ShardError", "SyncError"),
}
_LONG_POLL_S = 30.0
_HEALTH_PAUSE_S = 0.2
_ATTEMPTS = 4
_LAST_WORDS_S = 5.0


class TrainerClient(ServiceClient):
    """Async context manager that sends commands to one trainer service over HTTP.

    Args:
        url: http://host:port of the control API.
        token: access token of the trainer.
        timeout_s: seconds that a command may take.
        connect_timeout_s: seconds that a request may take, long polls aside.
    """

    def __init__(self, url: str, token: str, *, timeout_s: float, connect_timeout_s: float = 10.0) -> None:
        super().__init__(url, api_key=token, connect_timeout_s=connect_timeout_s)
        self._timeout_s, self._connect_timeout_s = timeout_s, connect_timeout_s
        self._process: LaunchedProcess | None = None

    async def wait_until_healthy(
        self, timeout_s: float, process: LaunchedProcess | None = None
    ) -> TrainerHealth:
        """Wait until the trainer answers; `process`, if it was launched here, gives its log to errors.

        Raises:
            ServiceStartError: the process ended, or did not answer in time; with its last log lines.
        """
        # Its log and its death explain errors of later requests.
        self._process = process

        async def ask() -> TrainerHealth | None:
            # One request each time: until the trainer listens there is nothing to repeat.
            with contextlib.suppress(TransientRequestError):
                return msgspec.json.decode(await self._request("GET", "/v1/health"), type=TrainerHealth)
            return None

        name = f"trainer at {self.url}"
        return await wait_for_start(name, ask, process, timeout_s, "start_timeout_s")

    async def health(self) -> TrainerHealth:
        """Ask for the trainer's state: run and version loaded, heartbeats of the ranks, command being carried out."""
        return msgspec.json.decode(await self._repeat("GET", "/v1/health"), type=TrainerHealth)

    async def do(
        self,
        command: Command[Answer],
        report: ProgressCallback | None = None,
        every_s: float = _LONG_POLL_S,
        starts: dict[str, int] | None = None,
    ) -> Answer:
        """Carry out a command and return its answer.

        A request or an answer that gets lost on the way is sent again, and the trainer carries the command out once.

        Args:
            command: the command.
            report: called with the command's progress every `every_s` seconds until it is done.
            every_s: seconds between two calls of `report`.
            starts: filled with the time at which each rank began the command, by process name, in nanoseconds since 1970.

        Raises:
            RequestError: the trainer refuses the command or cannot do it; or the error of rollmill.tasks.errors that the
                trainer raised.
            ServiceDiedError: the trainer no longer answers, or another process answers in its place.
        """
        asked_ns, poll_s = time.time_ns(), min(every_s, _LONG_POLL_S) if report else _LONG_POLL_S
        address = await self._submit(command)
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            body = await self._repeat("GET", f"{address}?wait_s={poll_s:g}", wait_s=poll_s)
            state = msgspec.msgpack.decode(body, type=OperationState)
            _record_spans(state.spans, asked_ns, starts)
            if state.status == "done":
                return decode_answer(command, state.answer)
            if state.status == "failed":
                if state.error_type == NothingLoadedError.__name__:
                    raise ServiceDiedError("trainer", "was started again, and has no policy loaded")
                # Under its own type where a caller would treat the error differently.
                if state.error_type in _RAISED_AS_THEMSELVES:
                    raise getattr(errors, state.error_type)(state.error)
                raise RequestError(f"trainer: {command.name}: {state.error}")
            if report:
                report(state.progress)
        limit = f"train.command_timeout_s = {self._timeout_s:g} s"
        raise RequestError(f"trainer: {command.name} not done within {limit}")

    async def offer(self) -> WeightOffer:
        """Ask the trainer for layout and address of the weights that it can send to servers."""
        return await self.do(OfferWeights())

    async def send(
        self,
        targets: Sequence[SendTarget],
        report: ProgressCallback | None = None,
        every_s: float = _LONG_POLL_S,
    ) -> list[SendResult]:
        """Have the trainer send its weights to servers; returns one result for each server.

        Args:
            targets: the servers, and how weights reach each.
            report: called with the bytes sent to each server every `every_s` seconds.
            every_s: seconds between two calls of `report`.
        """
        return await self.do(SendWeights(targets=list(targets)), report, every_s)

    async def stop_sending(self, target: SendTarget) -> None:
        """End the transfer to one server, whose outcome `send` then returns as an error."""
        await self.do(StopSending(prefix=target.prefix))

    async def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Have the trainer compute [B][T-1] log p(token i+1 | tokens 0..i) of sequences, in nats, at temperature 1."""
        return await self.do(ComputeLogprobs(sequences=sequences))

    async def shutdown(self) -> None:
        """Ask the service to end, without waiting for the end."""
        await self._submit(Shutdown())

    async def _submit(self, command: Command[Any]) -> str:
        """Send a command, which the trainer accepts once however often it is sent again; returns the operation's path."""
        # The trainer recognizes a repeated request by its key.
        address = f"/v1/operations/{uuid.uuid4().hex}"
        await self._repeat("PUT", address, encode_command(command))
        return address

    async def _repeat(self, method: str, path: str, content: bytes = b"", wait_s: float = 0.0) -> Body:
        """Send a request until it is answered, and return the answer's body; raise ServiceDiedError if all attempts fail."""

        def is_lost(error: Exception) -> bool:
            is_gone = self._process is not None and not self._process.is_running
            return isinstance(error, TransientRequestError) and not is_gone

        attempts = Retries(
            is_lost, attempts=_ATTEMPTS, backoff_s=_HEALTH_PAUSE_S, longest_s=self._connect_timeout_s
        )
        try:
            async for attempt in attempts:
                with attempt:
                    return await self._request(method, path, content, wait_s)
        except TransientRequestError as error:
            last_words = ""
            if self._process is not None:
                # A process that is ending gets the time to write why.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LAST_WORDS_S):
                        await self._process.wait()
                last_words = self._process.log_tail()
            reason = f"does not answer at {self.url}: {error}"
            raise ServiceDiedError("trainer", reason, last_words) from error
        raise AssertionError("the last attempt raises")

    async def _request(self, method: str, path: str, content: bytes = b"", wait_s: float = 0.0) -> Body:
        """Send one request, and return the answer's body; TransientRequestError without an answer, RequestError if refused."""
        status, body = await self._connection.ask(method, path, content, self._connect_timeout_s + wait_s)
        if status == HTTPStatus.NOT_FOUND and path.startswith("/v1/operations/"):
            raise ServiceDiedError("trainer", "was started again, and does not know the command")
        if status != HTTPStatus.OK:
            raise RequestError(f"trainer: {method} {path}: {status} {bytes(body).decode(errors='replace')}")
        return body


def _record_spans(spans: Sequence[Span], asked_ns: int, starts: dict[str, int] | None) -> None:
    """Shift the ranks' spans to the flow's clock, and add them to the flow's spans.

    The shift is bounded by this: rank 0 worked on the command between request and answer.

    Args:
        spans: the ranks' spans from an operation's state.
        asked_ns: when the command was sent, by the flow's clock, in nanoseconds since 1970.
        starts: filled with the time at which each rank began the command, by process name, in nanoseconds since 1970.
    """
    of_command = [each for each in spans if each.process == FIRST_RANK and each.name != IDLE]
    kept = shift_spans(spans, asked_ns, time.time_ns(), of_command)
    add_spans(kept)
    if starts is not None:
        starts |= command_starts(kept)
