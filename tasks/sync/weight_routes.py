"""The server's routes for new weights: one request takes them, holds requests while it must, and lets them go on.

GET  /rollmill/weights                       -> ServerPlace
POST /rollmill/weights   WeightOrder         -> WeightAnswer
"""

import time
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.platforms import current_platform

from tasks.sync.order import REQUESTS_HELD, ServerPlace, WeightAnswer, WeightOrder
from tasks.sync.place import this_machine

router = APIRouter()


@router.get("/rollmill/weights")
async def place(raw_request: Request) -> dict[str, Any]:
    """Where this server runs."""
    workers = raw_request.app.state.engine_client.vllm_config.parallel_config.world_size
    return ServerPlace(this_machine(), current_platform.device_type, (), workers).to_json()


@router.post("/rollmill/weights")
async def take(raw_request: Request, body: dict[str, Any]) -> dict[str, Any]:
    """Take new weights; an error leaves the old ones serving, unless it says that requests stay held."""
    engine, order = raw_request.app.state.engine_client, WeightOrder.from_json(body)
    started = time.perf_counter()
    await engine.pause_generation(mode="keep", clear_cache=True)
    try:
        await engine.start_weight_update()
        await engine.update_weights(WeightTransferUpdateRequest(update_info={"order": order.to_json()}))
        await engine.finish_weight_update(order.version)
        await engine.reset_prefix_cache()
    except Exception as error:
        raise HTTPException(500, f"{REQUESTS_HELD}, start this server again: {error}") from error
    await engine.resume_generation()
    held_s = time.perf_counter() - started
    return WeightAnswer(order.plan["total_bytes"], held_s, held_s).to_json()
