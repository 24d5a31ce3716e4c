"""The control API of rank 0: accepts commands by HTTP, and hands out their results by long poll.

POST /v1/COMMAND                       its fields as JSON -> {"operation": id}
GET  /v1/operations/ID?wait_s=30       -> {"status": running | done | failed, "progress", "result", "error_type", "error",
                                           "spans": [the fields of a Span each]}
GET  /v1/health                        -> TrainerHealth

Every request needs `Authorization: Bearer TOKEN`. A command that comes again with the same `Idempotency-Key` is the same operation.
"""

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import asdict, is_dataclass
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from pydantic import ValidationError

from tasks.errors import RollmillError
from tasks.observe.loop import LoopMonitor
from tasks.train.operations import Operation, Operations
from tasks.train.protocol import COMMANDS, IDEMPOTENCY_KEY, Command, TrainerHealth

MAX_WAIT_S = 60.0
_STOP_S = 5.0

LocalCommands = dict[str, Callable[[Any], Any]]
"""Commands that rank 0 answers by itself, while the ranks may be at another one."""

Progress = dict[str, Callable[[], Any]]
"""How far a command is that is under way, by its name; called on any thread."""


def control_app(
    operations: Operations,
    local: LocalCommands,
    progress: Progress,
    health: Callable[[], TrainerHealth],
    token: str,
    monitor: LoopMonitor | None = None,
) -> FastAPI:
    """The application; `token` is what a request must carry, `monitor` watches over the loop that serves it."""

    def authorized(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if not secrets.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "wrong or missing access token")

    app = FastAPI(
        dependencies=[Depends(authorized)],
        lifespan=_watched(monitor),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )

    @app.get("/v1/health")
    async def read_health() -> Response:
        return _json(health())

    @app.get("/v1/operations/{operation_id}")
    async def read_operation(
        operation_id: str, wait_s: float = Query(0.0, ge=0.0, le=MAX_WAIT_S)
    ) -> Response:
        operation = operations.find(operation_id)
        if operation is None:
            raise HTTPException(404, f"there is no operation {operation_id}")
        await asyncio.wait([asyncio.wrap_future(operation.outcome)], timeout=wait_s)
        state, how_far = _state(operation), progress.get(operation.command.name)
        if how_far and not operation.outcome.done():
            state["progress"] = await asyncio.to_thread(how_far)
        return _json(state)

    @app.post("/v1/{name}")
    async def accept(name: str, request: Request) -> Response:
        command, key = _parse(name, await request.body()), request.headers.get(IDEMPOTENCY_KEY, "")
        if name not in local:
            return _json({"operation": operations.submit(command, key).id})
        operation, is_new = operations.register(command, key)
        if is_new:
            threading.Thread(target=complete, args=(operation, local[name]), name=name, daemon=True).start()
        return _json({"operation": operation.id})

    return app


def _watched(monitor: LoopMonitor | None) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """What goes on while the application serves."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with monitor.watching() if monitor else nullcontext():
            yield

    return lifespan


def complete(operation: Operation, run: Callable[[Any], Any]) -> None:
    """Run a command into its operation's outcome; an error that we raise on purpose is an outcome."""
    try:
        result = run(operation.command)
    except RollmillError as error:
        operation.outcome.set_exception(error)
    else:
        operation.outcome.set_result(result)


def _parse(name: str, body: bytes) -> Command:
    if name not in COMMANDS:
        raise HTTPException(404, f"there is no command {name!r}; there are {', '.join(COMMANDS)}")
    try:
        return COMMANDS[name].model_validate_json(body or b"{}")
    except ValidationError as error:
        raise HTTPException(422, f"{name}: {error}") from None


def _state(operation: Operation) -> dict[str, Any]:
    outcome = operation.outcome
    if not outcome.done():
        return {"status": "running"}
    told = {"spans": operation.spans}
    if error := outcome.exception():
        return {"status": "failed", "error_type": type(error).__name__, "error": str(error), **told}
    return {"status": "done", "result": outcome.result(), **told}


def _json(value: Any) -> Response:
    """JSON in which a metric may be NaN."""
    return Response(json.dumps(value, default=_plain), media_type="application/json")


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} cannot be sent as JSON")


class ControlServer:
    """Serves the application on a thread of its own."""

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        self._socket = socket.create_server((host, port))
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="control", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Answer what was asked, then close."""
        self._server.should_exit = True
        self._thread.join(_STOP_S)
