"""What vLLM loads from this distribution for its HTTP server: new weights, and generations answered as arrays.

vLLM answers /inference/v1/generate with JSON: a text for each number, routed experts in base64. This plugin takes that
route's place, and answers a request that accepts ARRAYS with MessagePack whose fields are the arrays' bytes; others are
answered by vLLM. Loaded when VLLM_PLUGINS names it.
"""

import math
from array import array
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from vllm.entrypoints.scale_out.token_in_token_out import api_router
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request, with_cancellation

from tasks.sync import weight_routes
from tasks.sync.guard import Guard, keys_of

ARRAYS = "application/vnd.rollmill.arrays"
"""The same as the client's (tasks/serve/answers.py), which this environment need not be able to import."""

NO_LOGPROB = -9999.0
"""What vLLM's JSON has for a log-probability that is no number."""

router = APIRouter()


class ArraysEndpoint:
    """vLLM's protocol of an endpoint plugin."""

    name = "rollmill"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Take the place of vLLM's route, and guard all of them."""
        app.add_middleware(Guard)
        app.include_router(router)
        app.include_router(weight_routes.router)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Note the keys that requests need."""
        state.rollmill_keys = keys_of(args)


@router.post("/inference/v1/generate", dependencies=[Depends(validate_json_request)])
async def generate(request: GenerateRequest, raw_request: Request) -> Response:
    """One generation: as arrays where those are accepted and can say all that is asked for, else as vLLM does."""
    sampling = request.sampling_params
    has_more = request.stream or sampling.n != 1 or sampling.prompt_logprobs is not None
    if has_more or sampling.logprobs is None or ARRAYS not in raw_request.headers.get("accept", ""):
        return await api_router.generate(request, raw_request)
    return await _generate_arrays(request, raw_request)


@with_cancellation
@load_aware_call
async def _generate_arrays(request: GenerateRequest, raw_request: Request) -> Response:
    handler = api_router.generate_tokens(raw_request)
    if handler is None:
        raise HTTPException(501, "the model does not generate tokens")
    answer = await ArraysServing(handler).serve_tokens(request, raw_request)
    if isinstance(answer, ErrorResponse):
        return Response(answer.model_dump_json(), answer.error.code, media_type="application/json")
    return Response(answer, media_type=ARRAYS)


class ArraysServing(ServingTokens):
    """vLLM's own handler but for the last step, in which a finished generation is written."""

    def __init__(self, handler: ServingTokens) -> None:
        self.__dict__ = handler.__dict__

    async def serve_tokens_full_generator(
        self, request: Any, result_generator: AsyncGenerator[Any, None], request_id: str, *_: Any
    ) -> bytes:
        """Wait for the end of a generation, and write it."""
        final = None
        async for result in result_generator:
            final = result
        assert final is not None
        (output,) = final.outputs
        self._raise_if_error(output.finish_reason, request_id)
        return arrays_of(output)


def arrays_of(output: Any) -> bytes:
    """A finished completion (vllm.outputs.CompletionOutput) as the client reads it."""
    token_ids = array("i", output.token_ids)
    logprobs = array("f", map(_logprob, token_ids, output.logprobs or ()))
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


def _logprob(token: int, by_token: Any) -> float:
    found = by_token.get(token) if by_token else None
    if found is None or math.isnan(found.logprob):
        return NO_LOGPROB
    return max(float(found.logprob), NO_LOGPROB)
