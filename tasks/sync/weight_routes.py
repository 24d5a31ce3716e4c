"""The server's routes for new weights: one request takes them, holds requests while it must, and lets them go on.

GET  /rollmill/weights                       -> ServerPlace
POST /rollmill/weights   WeightOrder         -> WeightAnswer
"""

import asyncio
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.platforms import current_platform

from tasks.errors import SyncError, text_of
from tasks.observe.spans import Recorder, Span, recording, span
from tasks.sync.order import REQUESTS_HELD, ServerPlace, WeightAnswer, WeightOrder
from tasks.sync.place import this_machine
from tasks.sync.reports import Report, Reports

UNUSABLE = "unusable"
"""Version of a server that has neither the old nor the new weights; no policy's version is called like this."""

router = APIRouter()


@router.get("/rollmill/weights")
async def place(raw_request: Request) -> dict[str, Any]:
    """Where this server runs."""
    workers = _workers(raw_request.app.state.engine_client)
    return ServerPlace(this_machine(), current_platform.device_type, _gpus(workers), workers).to_json()


@router.post("/rollmill/weights")
async def take(raw_request: Request, body: dict[str, Any]) -> dict[str, Any]:
    """Take new weights; the text of an error says whether the old ones serve."""
    state, order = raw_request.app.state, WeightOrder.from_json(body)
    if under_way := getattr(state, "weights_under_way", ""):
        raise HTTPException(409, f"the old weights serve: version {under_way} is still being taken")
    state.weights_under_way = order.version
    try:
        return (await _taken(state, order, raw_request)).to_json()
    finally:
        state.weights_under_way = ""


async def _taken(state: Any, order: WeightOrder, raw_request: Request) -> WeightAnswer:
    engine = state.engine_client
    if await engine.get_weight_version() == UNUSABLE:
        raise HTTPException(500, f"{REQUESTS_HELD}, start this server again: an earlier update failed")
    try:
        reports = await _reports(engine, order, raw_request)
    except Exception as error:
        await engine.shutdown_weight_transfer_engine()
        raise HTTPException(500, f"the old weights serve: {text_of(error)}") from error
    if order.mode == "verify":
        try:
            return _answer([*reports, *await _compared(engine, order)], 0.0, ())
        except Exception as error:
            raise HTTPException(500, f"the old weights serve, not compared: {text_of(error)}") from error
    recorder = Recorder("")
    with recording(recorder, lane="weights"), span("switching") as switching:
        await _put_in_place(engine, order.version)
    return _answer(reports, switching.duration_s, recorder.take())


async def _reports(engine: Any, order: WeightOrder, raw_request: Request) -> list[Report]:
    """What the workers have taken, and are ready to put in place.

    Raises:
        SyncError: a worker failed, the deadline passed, or who gave the order has gone.
    """
    try:
        async with asyncio.timeout(order.timeout_s), Reports(_workers(engine)) as reports:
            info = {"order": order.to_json(), "reports": reports.address}
            await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
            async with asyncio.TaskGroup() as group:
                gone = group.create_task(_gone(raw_request))
                found = await reports.all()
                gone.cancel()
            return found
    except TimeoutError:
        raise SyncError(f"not all workers had all weights within {order.timeout_s:g} s") from None
    except ExceptionGroup as group_error:
        raise SyncError("; ".join(map(text_of, group_error.exceptions))) from group_error


async def _compared(engine: Any, order: WeightOrder) -> list[Report]:
    """What the workers' kernels, which serve one thread at a time, compute otherwise than with what has arrived."""
    async with asyncio.timeout(order.timeout_s), Reports(_workers(engine)) as reports:
        await engine.start_weight_update()
        info = {"reports": reports.address}
        await engine.update_weights(WeightTransferUpdateRequest(update_info=info))
        await engine.finish_weight_update()
        return await reports.all()


def _gpus(n_workers: int) -> tuple[str, ...]:
    """Ids of the workers' GPUs as torch has them, read without using one; NVML's begin with "GPU-"."""
    if not current_platform.is_cuda():
        return ()
    return tuple(str(current_platform.get_device_uuid(n)).removeprefix("GPU-") for n in range(n_workers))


def _workers(engine: Any) -> int:
    return int(engine.vllm_config.parallel_config.world_size)


async def _gone(raw_request: Request) -> None:
    """Raise SyncError when the one who gave the order hangs up."""
    while (await raw_request.receive())["type"] != "http.disconnect":
        pass
    raise SyncError("who gave the order hung up")


async def _put_in_place(engine: Any, version: str) -> None:
    """Hold requests, put the weights in place, and let requests go on.

    The caches of keys and values are cleared: requests under way compute theirs again, with the new weights.
    """
    # As engine.pause_generation, without its 20 ms for outputs that are under way.
    await engine.renderer.clear_mm_cache_async()
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
    try:
        await engine.start_weight_update()
        await engine.update_weights(WeightTransferUpdateRequest(update_info={}))
        await engine.finish_weight_update(version)
    except Exception as error:
        await engine.update_weight_version(UNUSABLE)
        raise HTTPException(500, f"{REQUESTS_HELD}, start this server again: {text_of(error)}") from error
    await engine.resume_generation()


def _answer(reports: Iterable[Report], held_s: float, switching: Iterable[Span]) -> WeightAnswer:
    """Of all workers: what the last one had, what any of them found, and what each did."""
    reports = list(reports)
    return WeightAnswer(
        bytes=max(each.bytes for each in reports),
        received_s=max(each.received_s for each in reports),
        held_s=held_s,
        checksums=reports[0].checksums,
        differing=tuple(sorted({name for each in reports for name in each.differing})),
        spans=(*(told for each in reports for told in each.spans), *map(tuple, switching)),
    )
