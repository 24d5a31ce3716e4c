"""The requests of a batch: every way sends the same ones, at most IN_FLIGHT at once."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np

from rollmill.tasks.serve.http_connection import HttpConnection
from rollmill.tasks.serve.responses import ARRAYS, Completion
from rollmill.tasks.serve.vllm_client import VllmClient
from tests.stubs.routing_server import N_PROMPT, N_TOKENS

N_ROWS, IN_FLIGHT = 128, 8
N_WARM_UP = 2 * IN_FLIGHT
TIMEOUT_S = 120.0
PROMPT = np.arange(N_PROMPT, dtype=np.int32)

Keep = Callable[[int, Completion], Awaitable[None]]


async def each_completion(client: VllmClient, keep: Keep, n_rows: int = N_ROWS) -> None:
    """Completions by the product's client, each handed on the moment it is there."""

    async def one(number: int) -> None:
        completion = await client.generate(
            PROMPT, max_tokens=N_TOKENS - N_PROMPT, temperature=1.0, seed=number, timeout_s=TIMEOUT_S
        )
        await keep(number, completion)

    await _each(one, n_rows)


async def each_body(url: str) -> None:
    """The same answers received by the product's connection, and dropped undecoded."""
    connection = HttpConnection(url, api_key="", connect_timeout_s=TIMEOUT_S)

    async def one(number: int) -> None:
        request = {"token_ids": PROMPT.tolist(), "sampling_params": {"seed": number}}
        content = msgspec.json.encode(request)
        await connection.send("POST", "/inference/v1/generate", content, TIMEOUT_S, ARRAYS)

    try:
        await _each(one, N_ROWS)
    finally:
        await connection.close()


async def warm_up(client: VllmClient) -> None:
    """The first N_WARM_UP answers, received, decoded and dropped: imports, decoding threads and the allocator."""

    async def drop(number: int, completion: Completion) -> None:
        """Nothing is done with it."""

    await each_completion(client, drop, N_WARM_UP)


async def _each(one: Callable[[int], Awaitable[None]], n_rows: int) -> None:
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def in_slot(number: int) -> None:
        async with slots:
            await one(number)

    async with asyncio.TaskGroup() as rows:
        for number in range(n_rows):
            rows.create_task(in_slot(number))
