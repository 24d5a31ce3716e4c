"""The control API of rank 0: accepts commands by HTTP, queues them, and returns their answers by long poll.

PUT /v1/operations/KEY             a Command in MessagePack; sent again with the same KEY it is the same operation
GET /v1/operations/KEY?wait_s=30   -> an OperationState in MessagePack
GET /v1/health                     -> TrainerHealth in JSON

Every request needs `Authorization: Bearer TOKEN`.
"""

import asyncio
import queue
import secrets
import socket
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response

from rollmill.tasks.errors import RequestError, RollmillError
from rollmill.tasks.observe.loop_monitor import LoopMonitor
from rollmill.tasks.observe.spans import Span
from rollmill.tasks.train.service.answers import OperationState, TrainerHealth
from rollmill.tasks.train.service.commands import Command, decode_command

_KEPT_RESULTS = 256


MAX_WAIT_S = 60.0
_STOP_S = 5.0


class ControlledTrainer(Protocol):
    """What the control API needs of rank 0, and calls on its own threads."""

    def health(self) -> TrainerHealth:
        """Return the trainer's state."""

    def answers_at_once(self, command: Command[Any]) -> bool:
        """Return True for a command that `run` can carry out on a thread while the ranks carry out another one."""

    def run(self, command: Command[Any]) -> Any:
        """Carry out a command that needs no other rank, and return its answer."""

    def progress(self, command: Command[Any]) -> dict[str, int]:
        """Return counts by name that show how far a running command is; empty if the command reports none."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A command sent to the control API, with its outcome.

    Attributes:
        command: the command.
        outcome: future of the command's answer or error.
        spans: timed activities of the ranks since the command before; complete once this command is done.
    """

    command: Command[Any]
    outcome: "Future[Any]" = field(default_factory=Future)
    spans: list[Span] = field(default_factory=list)

    def run(self, run: Callable[[Command[Any]], Any]) -> None:
        """Call `run` with the command, and set what it returns, or the RollmillError that it raises, as the outcome.

        Other errors are raised, and leave the outcome open. Call it once.
        """
        try:
            answer = run(self.command)
        except RollmillError as error:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(answer)

    def final_state(self) -> OperationState | None:
        """Return the answer or error of a command that is done; None while it is being carried out."""
        if not self.outcome.done():
            return None
        if error := self.outcome.exception():
            return OperationState(
                "failed", error_type=type(error).__name__, error=str(error), spans=self.spans
            )
        answer = msgspec.Raw(msgspec.msgpack.encode(self.outcome.result()))
        return OperationState("done", answer=answer, spans=self.spans)


class Operations:
    """Known commands by their keys, and the queue that passes new ones from the control API to rank 0's main thread.

    Attributes:
        queue: operations that all ranks are to carry out, in order.
    """

    def __init__(self) -> None:
        # Unbounded: the flow, which alone has the token, awaits each command, so that one or two wait.
        self.queue: queue.Queue[Operation] = queue.Queue()
        self._known: OrderedDict[str, Operation] = OrderedDict()
        self._lock = threading.Lock()

    def accept(self, key: str, command: Command[Any], trainer: ControlledTrainer) -> None:
        """Begin a command on a thread or in the queue, unless its key is known.

        A command with `is_joined` that equals one still being carried out gets the same operation instead.
        """
        with self._lock:
            # A client that lost the answer to its request sends the same key again.
            if key in self._known:
                return
            for known in self._known.values():
                if command.is_joined and known.command == command and not known.outcome.done():
                    self._known[key] = known
                    return
            # Answers are kept for clients that lost one; commands are few, and the oldest answers go first.
            operation = self._known[key] = Operation(command)
            done = [key for key, each in self._known.items() if each.outcome.done()]
            for key in done[: max(0, len(self._known) - _KEPT_RESULTS)]:
                del self._known[key]
        if trainer.answers_at_once(command):
            work = operation.run
            threading.Thread(target=work, args=(trainer.run,), name=command.name, daemon=True).start()
        else:
            self.queue.put(operation)

    def find(self, key: str) -> Operation | None:
        """Return the operation of a key; None if the key is unknown, or its answer was dropped as one of the oldest."""
        return self._known.get(key)

    @property
    def busy(self) -> str:
        """Name of a command that is not done; empty when all are."""
        with self._lock:
            return next((each.command.name for each in self._known.values() if not each.outcome.done()), "")


def build_control_app(
    operations: Operations, trainer: ControlledTrainer, token: str, monitor: LoopMonitor | None = None
) -> FastAPI:
    """Build the HTTP application of the control API: health, submission of a command, long poll for its answer.

    Args:
        operations: known commands; new ones are queued there for the ranks.
        trainer: rank 0, which answers health, progress and local commands.
        token: bearer token that each request must carry.
        monitor: watches the event loop that serves the application; None: nothing does.
    """

    def authorize(request: Request) -> None:
        given = request.headers.get("authorization", "")
        # Constant time: the token cannot be guessed character by character.
        if not secrets.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "wrong or missing access token")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # The monitor measures the loop that it is started on, which uvicorn creates on the server's thread.
        with monitor.watch() if monitor else nullcontext():
            yield

    app = FastAPI(
        dependencies=[Depends(authorize)],
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )

    @app.get("/v1/health")
    async def read_health() -> Response:
        return Response(msgspec.json.encode(trainer.health()), media_type="application/json")

    @app.get("/v1/operations/{key}")
    async def read_operation(key: str, wait_s: float = Query(0.0, ge=0.0, le=MAX_WAIT_S)) -> Response:
        operation = operations.find(key)
        if operation is None:
            raise HTTPException(404, f"there is no operation {key}")
        await asyncio.wait([asyncio.wrap_future(operation.outcome)], timeout=wait_s)
        state = operation.final_state()
        if state is None:
            # `progress` asks a store over the network, which must not block the loop that answers health.
            state = OperationState("running", await asyncio.to_thread(trainer.progress, operation.command))
        return Response(msgspec.msgpack.encode(state), media_type="application/msgpack")

    @app.put("/v1/operations/{key}")
    async def accept(key: str, request: Request) -> Response:
        try:
            command = decode_command(await request.body())
        except RequestError as error:
            raise HTTPException(422, str(error)) from None
        operations.accept(key, command, trainer)
        return Response()

    return app


class ControlServer:
    """Serves an application on a separate thread."""

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        self._socket = socket.create_server((host, port))
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="control", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Let the server answer the requests it has begun, then close it."""
        self._server.should_exit = True
        self._thread.join(_STOP_S)
