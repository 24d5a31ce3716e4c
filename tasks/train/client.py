"""Talks to the trainer's control API."""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import httpx

from tasks.errors import RequestError, ServiceDiedError, ServiceStartError
from tasks.observe.retries import Attempts, retries
from tasks.serve.process import LaunchedProcess
from tasks.store.deliveries import Delivery
from tasks.sync.order import Sent, Target, WeightOffer
from tasks.train.answers import detail_of, error_of, keep_spans
from tasks.train.protocol import (
    IDEMPOTENCY_KEY,
    AwaitCheckpoint,
    Checkpoint,
    CheckpointBegun,
    CheckpointWritten,
    Command,
    Digests,
    ExportPolicy,
    Load,
    Logprobs,
    Offer,
    ScoreRows,
    Send,
    Shutdown,
    StepResult,
    StorePolicy,
    TellSpans,
    TrainerHealth,
    TrainStep,
    WeightDigests,
    WriteWeights,
)

Report = Callable[[Mapping[str, int]], None]
"""Told the bytes that have gone to each server so far, by its name."""

_LONG_POLL_S = 30.0
_HEALTH_PAUSE_S = 0.2
_ATTEMPTS = 4
_LAST_WORDS_S = 5.0


class TrainerClient:
    """Client of one trainer service; an async context manager.

    Every command raises RequestError when the trainer refuses it or cannot do it, or the error of
    tasks.errors that the trainer raised; and ServiceDiedError when the trainer is gone. A request or an answer that gets
    lost on the way is sent again, and what a command asks for is done once.
    """

    def __init__(self, url: str, token: str, *, timeout_s: float, connect_timeout_s: float = 10.0) -> None:
        self._timeout_s, self._connect_timeout_s = timeout_s, connect_timeout_s
        self._process: LaunchedProcess | None = None
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def wait_until_healthy(
        self, timeout_s: float, process: LaunchedProcess | None = None
    ) -> TrainerHealth:
        """Wait until the trainer answers; `process` is the one that was launched, for its log.

        Raises:
            ServiceStartError: it ended, or did not answer in time; with its last log lines.
        """
        self._process = process
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                return TrainerHealth(**await self._request("GET", "/v1/health"))
            if process is not None and not process.is_running:
                reason = f"ended with status {process.returncode} while starting"
                raise ServiceStartError("trainer", reason, process.log_tail())
            await asyncio.sleep(_HEALTH_PAUSE_S)
        reason = f"not healthy within train.start_timeout_s = {timeout_s:g} s at {self._http.base_url}"
        raise ServiceStartError("trainer", reason, process.log_tail() if process is not None else "")

    async def health(self) -> TrainerHealth:
        """Where the trainer stands."""
        return TrainerHealth(**await self._answer("GET", "/v1/health"))

    async def load(
        self, *, run: str, incarnation: int, model: str, folder: str, checkpoint: str | None, version: int
    ) -> None:
        """Stand at `version` of a run: from a checkpoint's folder, or from the model's when there is none."""
        await self._do(
            Load(
                run=run,
                incarnation=incarnation,
                model=model,
                folder=folder,
                checkpoint=checkpoint,
                version=version,
            )
        )

    async def train_step(
        self, *, folder: str, run: str, step: int, digest: str, hands_over: bool = True
    ) -> StepResult:
        """Apply the stored batch of a step, once: asked again, the trainer returns what it returned.

        With `hands_over` the rows that it makes, which the result names, are to be stored.

        Raises:
            BatchRefusedError: the trainer stands at another step, or holds another digest.
        """
        command = TrainStep(folder=folder, run=run, step=step, digest=digest, hands_over=hands_over)
        starts = dict[str, int]()
        return replace(StepResult.parse(await self._do(command, starts=starts)), starts_ns=starts)

    async def score_rows(
        self, *, folder: str, run: str, step: int, trajectory_ids: list[str]
    ) -> Delivery | None:
        """The trainer's log-probabilities of stored rollouts of the step that it stands at, to be stored; None without any.

        Raises:
            BatchRefusedError: the trainer stands at another step.
        """
        command = ScoreRows(folder=folder, run=run, step=step, trajectory_ids=trajectory_ids)
        made = await self._do(command)
        return Delivery.parse(made) if made else None

    async def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """[B][T-1] raw log-probabilities in nats: log p(token i+1 | tokens 0..i), at temperature 1."""
        return list(await self._do(Logprobs(sequences=sequences)))

    async def offer(self) -> WeightOffer:
        """What the trainer has to give to servers; the same until it loads again."""
        return WeightOffer.from_json(await self._do(Offer()))

    async def send(
        self, targets: Sequence[Target], report: Report | None = None, every_s: float = _LONG_POLL_S
    ) -> list[Sent]:
        """Send the weights to servers that take them at the same time; what became of each, in their order.

        Args:
            targets: the servers.
            report: called every `every_s` seconds until then, with the bytes that have gone to each server.
            every_s: seconds.
        """
        command = Send(targets=[each.to_json() for each in targets])
        sent = await self._do(command, report, every_s if report else _LONG_POLL_S)
        return [Sent.from_json(each) for each in sent]

    async def write_weights(self, folder: str, version: int) -> list[str]:
        """Write the version that the trainer stands at into safetensors files below a folder, for servers to read.

        Args:
            folder: a local path, or s3://bucket/prefix; what older versions left there is removed.
            version: that the trainer stands at.

        Returns:
            Where the files are.

        Raises:
            SyncError: they could not be written; names the file and what to do.
        """
        return list(await self._do(WriteWeights(folder=folder, version=version)))

    async def weight_digests(self, names: Sequence[str] = ()) -> dict[str, str]:
        """SHA-256 of tensors as they are sent, 64 hex digits, by name; without names of all."""
        return dict(await self._do(WeightDigests(names=list(names))))

    async def tell_spans(self) -> None:
        """Have the ranks tell what they did since the last command, idling too."""
        await self._do(TellSpans())

    async def checkpoint(self, folder: str, version: int) -> CheckpointBegun:
        """Begin to write the version that the trainer stands at into RUN/checkpoints; it is copied when this returns.

        Raises:
            StoreError: its place could not be made; or the last one was not written, and nobody has been told so.
        """
        return CheckpointBegun(**await self._do(Checkpoint(folder=folder, version=version)))

    async def await_checkpoint(self, version: int) -> CheckpointWritten:
        """Wait until the checkpoint that was begun last is complete.

        Raises:
            LeaseLostError: the run is on S3, and a newer trainer has loaded it.
            StoreError: it could not be written; names the file and what to do. It is as if it had not been begun.
        """
        return CheckpointWritten(**await self._do(AwaitCheckpoint(version=version)))

    async def export_policy(self, path: str) -> None:
        """Write the weights as a Hugging Face model folder."""
        await self._do(ExportPolicy(path=path))

    async def store_policy(self, folder: str, version: int) -> str:
        """Write the version that the trainer stands at into RUN/policies, unless it is there; returns where it is.

        Raises:
            LeaseLostError: the run is on S3, and a newer trainer has loaded it.
            StoreError: it could not be stored.
        """
        return str(await self._do(StorePolicy(folder=folder, version=version)))

    async def digests(self) -> dict[str, str]:
        """SHA-256 of every tensor of weights and moments, 64 hex digits, by name."""
        return dict(await self._do(Digests()))

    async def shutdown(self) -> None:
        """Ask the service to end."""
        await self._order(Shutdown())

    async def _do(
        self,
        command: Command,
        report: Report | None = None,
        every_s: float = _LONG_POLL_S,
        starts: dict[str, int] | None = None,
    ) -> Any:
        """Send a command and wait for its result; `report` is told now and then how far it is, `starts` when ranks began."""
        asked_ns = time.time_ns()
        address = f"/v1/operations/{(await self._order(command))['operation']}"
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            state = await self._answer("GET", address, wait_s=min(every_s, _LONG_POLL_S))
            keep_spans(state, asked_ns, starts)
            if state["status"] == "done":
                return state["result"]
            if state["status"] == "failed":
                raise error_of(command.name, state["error_type"], state["error"])
            if report:
                report(state.get("progress", {}))
        limit = f"train.step_timeout_s = {self._timeout_s:g} s"
        raise RequestError(f"trainer: {command.name} not done within {limit}")

    async def _order(self, command: Command) -> Any:
        """Have a command accepted, once however often it has to be sent."""
        return await self._answer("POST", f"/v1/{command.name}", command, uuid.uuid4().hex)

    async def _answer(
        self, method: str, path: str, command: Command | None = None, key: str = "", **query: float
    ) -> Any:
        """The answer to a request that may be sent again, `key` being the idempotency key of a command."""
        try:
            async for attempt in self._attempts():
                with attempt:
                    return await self._request(method, path, command, key, **query)
        except httpx.TransportError as error:
            reason = f"does not answer at {self._http.base_url}: {str(error) or type(error).__name__}"
            raise ServiceDiedError("trainer", reason, await self._last_words()) from error
        raise AssertionError("the last attempt raises")

    def _attempts(self) -> Attempts:
        """Attempts of a request, as long as the process lives that we launched."""

        def is_lost(error: Exception) -> bool:
            is_gone = self._process is not None and not self._process.is_running
            return isinstance(error, httpx.TransportError) and not is_gone

        longest_s = self._connect_timeout_s
        return retries(is_lost, attempts=_ATTEMPTS, backoff_s=_HEALTH_PAUSE_S, longest_s=longest_s)

    async def _request(
        self, method: str, path: str, command: Command | None = None, key: str = "", **query: float
    ) -> Any:
        timeout_s = self._connect_timeout_s + query.get("wait_s", 0.0)
        headers, body = {IDEMPOTENCY_KEY: key} if key else {}, command.model_dump() if command else None
        response = await self._http.request(
            method, path, json=body, params=query, headers=headers, timeout=timeout_s
        )
        if response.status_code != httpx.codes.OK:
            raise RequestError(f"trainer: {method} {path}: {response.status_code} {detail_of(response)}")
        return json.loads(response.content)

    async def _last_words(self) -> str:
        """The end of the log of a process that we launched, when that process has had time to write it."""
        if self._process is None:
            return ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._process.ended()
        return self._process.log_tail()
