"""vLLM's endpoint plugin of this distribution: routes for new weights, generations as arrays, an API key on all routes.

GET  /rollmill/weights                               -> ServerLocation
POST /rollmill/weights   WeightUpdateRequest         -> WeightUpdateResponse

An update receives weights while the server samples, and holds requests only to put them in place.

vLLM answers /inference/v1/generate with JSON: a text for each number, routed experts in base64. This plugin replaces the
route and answers requests that accept ARRAYS with MessagePack, whose fields are the bytes of arrays. vLLM answers the rest.

vLLM requires its API key on /v1, /v2, /inference and /cohere alone. That leaves routes open that control a server: /pause,
/collective_rpc, /update_weights, /rollmill/weights. `KeyGuard` requires it on every route.
"""

import asyncio
import logging
import math
import os
import secrets
from array import array
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from rollmill.tasks.errors import SyncError, error_text
from rollmill.tasks.observe.spans import Recorder, Span, recording, span
from rollmill.tasks.processes.machine import machine_id
from rollmill.tasks.sync.links.shm_link import SharedMemory
from rollmill.tasks.sync.vllm_plugin.private_vllm import (
    CANCEL,
    CHECK_JSON,
    COUNT_LOAD,
    ERROR_RESPONSE,
    FIND_HANDLER,
    GENERATE_REQUEST,
    GENERATE_ROUTE,
    INIT_REQUEST,
    PLATFORM,
    UPDATE_REQUEST,
    Feature,
    encode_responses,
    require,
)
from rollmill.tasks.sync.vllm_plugin.worker_reports import WorkerReport, WorkerReports
from rollmill.tasks.sync.weight_messages import (
    REQUESTS_HELD,
    SHARED_TRANSPORTS,
    ServerLocation,
    WeightUpdateRequest,
    WeightUpdateResponse,
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ARRAYS = "application/vnd.rollmill.arrays"
"""Equal to the client's (tasks/serve/responses.py), which may be missing in vLLM's environment."""

# vLLM's JSON has this value for a log-probability that is not a number, so both forms decode to the same array.
NO_LOGPROB = -9999.0

UNUSABLE = "unusable"
"""Version of a server that has neither the old nor the new weights; no policy version has this name."""

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})
"""Routes of load balancers and monitors, which neither show nor change the model."""

weight_router = APIRouter()


class ServerRoutes:
    """Rollmill's HTTP routes as a plugin of vLLM, by the protocol of such plugins; loaded if VLLM_PLUGINS names it."""

    name = "rollmill"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add Rollmill's routes to a vLLM server, and let all its routes check API keys."""
        app.add_middleware(KeyGuard)
        try:
            app.include_router(make_arrays_router())
        except SyncError as error:
            # The client reads vLLM's JSON as well.
            logging.getLogger("vllm.rollmill").warning("%s", error)
        app.include_router(weight_router)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Store the server's API keys in the application's state, where `KeyGuard` finds them."""
        state.rollmill_keys = read_keys(args)


# API keys


def read_keys(args: Any) -> tuple[str, ...]:
    """Read the API keys of a vLLM server: those of --api-key, else the one of VLLM_API_KEY; empty if there is none."""
    given = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    return tuple(key for key in given if key)


class KeyGuard:
    """ASGI middleware that answers 401 to requests without a key, if the application's `state.rollmill_keys` has any."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request that has a key, or needs none, to the application; answer 401 to others."""
        if scope["type"] not in ("http", "websocket") or _may_pass(scope):
            await self._app(scope, receive, send)
        else:
            answer = JSONResponse({"error": "this route needs the server's API key"}, status_code=401)
            await answer(scope, receive, send)


def _may_pass(scope: Scope) -> bool:
    keys: Sequence[str] = getattr(scope["app"].state, "rollmill_keys", ())
    if not keys or scope["path"].removeprefix(scope.get("root_path", "")) in OPEN_PATHS:
        return True
    given = dict(scope["headers"]).get(b"authorization", b"")
    return any(secrets.compare_digest(given, f"Bearer {key}".encode()) for key in keys)


# Generations as arrays


def make_arrays_router() -> APIRouter:
    """Return a router with the generation route that answers with arrays; SyncError if vLLM lacks a name that it needs."""
    require(Feature.ARRAYS)
    generate_arrays = CANCEL.find()(COUNT_LOAD.find()(_generate_arrays))

    async def generate(request: Any, raw_request: Request) -> Response:
        """Generate one completion; respond with arrays if the client accepts them, else as vLLM does."""
        can_be_arrays = ARRAYS in raw_request.headers.get("accept", "") and _fits_arrays(request)
        return await (generate_arrays if can_be_arrays else GENERATE_ROUTE.find())(request, raw_request)

    # FastAPI reads the body's type from the annotation.
    generate.__annotations__["request"] = GENERATE_REQUEST.find()
    router = APIRouter()
    router.post("/inference/v1/generate", dependencies=[Depends(CHECK_JSON.find())])(generate)
    return router


def _fits_arrays(request: Any) -> bool:
    sampling = request.sampling_params
    has_more = request.stream or sampling.n != 1 or sampling.prompt_logprobs is not None
    return not has_more and sampling.logprobs is not None


async def _generate_arrays(request: Any, raw_request: Request) -> Response:
    handler = FIND_HANDLER.find()(raw_request)
    if handler is None:
        raise HTTPException(501, "the model does not generate tokens")
    answer = await encode_responses(handler, encode_arrays).serve_tokens(request, raw_request)
    if isinstance(answer, ERROR_RESPONSE.find()):
        return Response(answer.model_dump_json(), answer.error.code, media_type="application/json")
    return Response(answer, media_type=ARRAYS)


def encode_arrays(output: Any) -> bytes:
    """Encode a finished completion (`vllm.outputs.CompletionOutput`) as MessagePack, in the media type ARRAYS."""

    def find_logprob(token: int, by_token: Any) -> float:
        found = by_token.get(token) if by_token else None
        if found is None or math.isnan(found.logprob):
            return NO_LOGPROB
        return max(float(found.logprob), NO_LOGPROB)

    token_ids = array("i", output.token_ids)
    logprobs = array("f", map(find_logprob, token_ids, output.logprobs or ()))
    answer = {
        "token_ids": token_ids.tobytes(),
        "logprobs": logprobs.tobytes(),
        "finish_reason": output.finish_reason or "stop",
        "weight_versions": output.weight_versions or [],
    }
    if (experts := output.routed_experts) is not None:
        answer |= {
            "routed_experts": experts.data.cast("B"),
            "routed_shape": experts.shape,
            "routed_dtype": experts.dtype.str,
        }
    return msgspec.msgpack.encode(answer)


# New weights


@weight_router.get("/rollmill/weights")
async def read_location(raw_request: Request) -> Response:
    """Answer GET: the server's machine, device type, GPUs and number of workers, as JSON of a `ServerLocation`.

    Raises:
        HTTPException: it cannot take new weights.
    """
    engine = raw_request.app.state.engine_client
    # An update would be put in place when the workers of the first replica are ready.
    if (replicas := engine.vllm_config.parallel_config.data_parallel_size) > 1:
        text = f"it has {replicas} replicas (data parallelism), which cannot take new weights: start a server for each"
        raise HTTPException(409, text)
    workers = _count_workers(engine)
    gpus: tuple[str, ...] = ()
    platform = PLATFORM.find()
    if platform.is_cuda():
        # NVML's ids, since torch would initialize a GPU in this process; torch's form of them lacks "GPU-".
        gpus = tuple(str(platform.get_device_uuid(number)).removeprefix("GPU-") for number in range(workers))
    return _json(ServerLocation(machine_id(), platform.device_type, gpus, workers))


@weight_router.post("/rollmill/weights")
async def update_weights(raw_request: Request) -> Response:
    """Answer POST of a `WeightUpdateRequest`: replace the weights. An error's text says whether the old ones still serve."""
    state = raw_request.app.state
    try:
        request = msgspec.json.decode(await raw_request.body(), type=WeightUpdateRequest)
    except msgspec.MsgspecError as error:
        raise HTTPException(422, f"the old weights serve: {error}") from error
    # A worker's buffer and links serve one request at a time.
    if running := getattr(state, "weights_under_way", ""):
        raise HTTPException(409, f"the old weights serve: the server is still receiving version {running}")
    state.weights_under_way = request.version
    try:
        return _json(await _update_weights(state, request, raw_request))
    finally:
        state.weights_under_way = ""


async def _update_weights(
    state: Any, request: WeightUpdateRequest, raw_request: Request
) -> WeightUpdateResponse:
    engine = state.engine_client
    if await engine.get_weight_version() == UNUSABLE:
        raise HTTPException(500, f"{REQUESTS_HELD}, start this server again: an earlier update failed")
    try:
        reports = await _collect_reports(engine, request, raw_request, _share_memory(state, request))
    except Exception as error:
        # Ends the threads of the workers that still receive; the live model stays as it was.
        await engine.shutdown_weight_transfer_engine()
        # A thread that ends late may still write into it.
        _free_memory(state)
        raise HTTPException(500, f"the old weights serve: {error_text(error)}") from error
    if request.mode == "verify":
        try:
            # A kernel serves one thread at a time, so kernels are not compared while the model computes.
            async with asyncio.timeout(request.timeout_s):
                compared = await _put_in_place(engine)
            return _merge_reports([*reports, *compared], 0.0, (), request.snapshot)
        except Exception as error:
            raise HTTPException(500, f"the old weights serve, not compared: {error_text(error)}") from error
    recorder = Recorder("")
    if not all(each.is_compared for each in reports):
        with recording(recorder, lane="weights"), span("loading"):
            await _compare_copies(engine, request.timeout_s)
    with recording(recorder, lane="weights"), span("switching") as switching:
        compared = await _switch_weights(engine, request.version)
    return _merge_reports([*reports, *compared], switching.duration_s, recorder.take(), request.snapshot)


def _share_memory(state: Any, request: WeightUpdateRequest) -> str:
    """Return the path of memory into which one worker receives a request's weights for all; empty if each receives its own."""
    if request.transport not in SHARED_TRANSPORTS or _count_workers(state.engine_client) == 1:
        return ""
    size_bytes = request.decode_plan().total_bytes
    memory: SharedMemory | None = getattr(state, "weight_memory", None)
    # Kept for the next request, as a worker's own buffer is.
    if memory is None or memory.stream.numel() != size_bytes:
        _free_memory(state)
        memory = state.weight_memory = SharedMemory(size_bytes)
    return memory.path


def _free_memory(state: Any) -> None:
    if memory := getattr(state, "weight_memory", None):
        memory.close()
        state.weight_memory = None


async def _collect_reports(
    engine: Any, request: WeightUpdateRequest, raw_request: Request, memory: str
) -> list[WorkerReport]:
    """Have the workers receive the weights; returns their reports once all are ready to switch.

    With `memory` the first worker receives into it before all load from it.

    Raises:
        SyncError: a worker failed, the deadline passed, or the client disconnected.
    """
    info = {"request": msgspec.json.encode(request).decode(), "memory": memory}
    found: list[WorkerReport] = []
    try:
        async with asyncio.timeout(request.timeout_s), asyncio.TaskGroup() as group:
            disconnect = group.create_task(_await_disconnect(raw_request))
            for has_arrived in (False, True) if memory else (False,):
                async with WorkerReports(_count_workers(engine)) as reports:
                    begun = info | {"reports": reports.address, "has_arrived": has_arrived}
                    await engine.init_weight_transfer_engine(INIT_REQUEST.find()(init_info=begun))
                    found += await reports.all()
            disconnect.cancel()
        return found
    except TimeoutError:
        raise SyncError(f"not all workers had all weights within {request.timeout_s:g} s") from None
    except ExceptionGroup as group_error:
        raise SyncError("; ".join(map(error_text, group_error.exceptions))) from group_error


async def _compare_copies(engine: Any, timeout_s: float) -> None:
    """Have the workers compare the copies that they have loaded with the weights, a slice between two steps of the live model.

    Raises:
        HTTPException: a worker failed, or it took longer than `timeout_s`; the old weights serve.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not all(each.is_compared for each in await _put_in_place(engine, compares=True)):
                pass
    except Exception as error:
        await engine.shutdown_weight_transfer_engine()
        raise HTTPException(500, f"the old weights serve: {error_text(error)}") from error


async def _put_in_place(
    engine: Any, version: str | None = None, *, compares: bool = False
) -> list[WorkerReport]:
    """Have the workers put the received weights in place, or only compare them in mode verify; returns their reports.

    Args:
        engine: vLLM's client of its engine.
        version: the new name of the server's weights; None: it keeps its name.
        compares: have them compare a slice of what is to be put in place.
    """
    async with WorkerReports(_count_workers(engine)) as reports:
        await engine.start_weight_update()
        info = {"reports": reports.address, "compares": compares}
        await engine.update_weights(UPDATE_REQUEST.find()(update_info=info))
        await engine.finish_weight_update(version)
        return await reports.all()


async def _switch_weights(engine: Any, version: str) -> list[WorkerReport]:
    """Hold the server's requests, put the received weights in place, and continue the requests; returns the workers' reports.

    Raises:
        HTTPException: putting the weights in place failed; the requests stay held.
    """
    # Requests are frozen before `start_weight_update`: from then on a decode step would kill the engine. With the keys and
    # values of the old weights (clear_cache=False) they would continue with log-probabilities that are off by whole nats.
    await engine.pause_generation(mode="keep", clear_cache=True)
    try:
        compared = await _put_in_place(engine, version)
    except Exception as error:
        # Some layers may have new weights and others old ones, so the requests are never continued.
        await engine.update_weight_version(UNUSABLE)
        raise HTTPException(500, f"{REQUESTS_HELD}, start this server again: {error_text(error)}") from error
    await engine.resume_generation()
    return compared


async def _await_disconnect(raw_request: Request) -> None:
    """Raise SyncError when the client disconnects."""
    while (await raw_request.receive())["type"] != "http.disconnect":
        pass
    raise SyncError("the client that asked for the update disconnected")


def _merge_reports(
    reports: Iterable[WorkerReport], held_s: float, switching: Iterable[Span], snapshot: str
) -> WeightUpdateResponse:
    """Merge the reports of all workers into one response: times of the slowest, differences of any, spans of all."""
    reports = list(reports)
    return WeightUpdateResponse(
        bytes=max(each.bytes for each in reports),
        received_s=max(each.received_s for each in reports),
        held_s=held_s,
        checksums=next((each.checksums for each in reports if each.checksums), {}),
        differing=tuple(sorted({name for each in reports for name in each.differing})),
        uncompared=tuple(sorted({name for each in reports for name in each.uncompared})),
        spans=(*(each for report in reports for each in report.spans), *switching),
        snapshot=snapshot,
    )


def _count_workers(engine: Any) -> int:
    return int(engine.vllm_config.parallel_config.world_size)


def _json(message: ServerLocation | WeightUpdateResponse) -> Response:
    return Response(msgspec.json.encode(message), media_type="application/json")
