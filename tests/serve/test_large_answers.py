"""Answers of many megabytes: received in place, decoded in a thread, as views on what came."""

import asyncio
import base64
import io
import threading

import msgspec
import numpy as np
import pytest

from rollmill.tasks.errors import TransientRequestError
from rollmill.tasks.serve.config import ServeConfig
from rollmill.tasks.serve.responses import Completion, decode_completion
from rollmill.tasks.serve.vllm_client import PATIENCE, VllmClient

N_TOKENS = 4_000
IDS = np.arange(N_TOKENS, dtype=np.int32)
LOGPROBS = -np.linspace(0, 1, N_TOKENS, dtype=np.float32)
EXPERTS = np.random.default_rng(0).integers(0, 128, (N_TOKENS + 9, 48, 8), np.uint8)


def npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def as_json(**choice: object) -> bytes:
    content = [{"logprob": each} for each in LOGPROBS.tolist()]
    given = {"token_ids": IDS.tolist(), "logprobs": {"content": content}, "finish_reason": "stop"}
    return msgspec.json.encode({"choices": [given | {"routed_experts": npy(EXPERTS)} | choice]})


def as_arrays() -> bytes:
    return msgspec.msgpack.encode(
        {
            "token_ids": IDS.tobytes(),
            "logprobs": LOGPROBS.tobytes(),
            "finish_reason": "stop",
            "weight_versions": [],
            "routed_experts": EXPERTS.tobytes(),
            "routed_shape": EXPERTS.shape,
            "routed_dtype": "|u1",
        }
    )


async def generate(body: bytes) -> Completion:
    """What a client makes of an answer that comes in pieces."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 70_000):
            writer.write(body[start : start + 70_000])
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with VllmClient(f"http://127.0.0.1:{port}", ServeConfig()) as client:
            prompt = np.zeros(10, np.int32)
            return await client.generate(prompt, max_tokens=9, temperature=1.0, seed=0, timeout_s=60.0)


@pytest.mark.parametrize("body", [as_json(), as_arrays()], ids=["json", "arrays"])
async def test_a_large_answer_is_the_arrays_that_were_sent(body: bytes) -> None:
    completion = await generate(body)
    np.testing.assert_array_equal(completion.token_ids, IDS)
    np.testing.assert_array_equal(completion.logprobs, LOGPROBS)
    np.testing.assert_array_equal(completion.routed_experts, EXPERTS)


async def test_large_answers_are_decoded_by_few_threads() -> None:
    await asyncio.gather(*(generate(as_arrays()) for _ in range(3)))
    decoders = [each for each in threading.enumerate() if each.name.startswith("decode-answer")]
    assert len(decoders) <= 3 * PATIENCE.decode_threads


def test_arrays_are_views_on_the_answer() -> None:
    body = np.frombuffer(as_arrays(), np.uint8)
    completion = decode_completion(body.data)
    for each in (completion.token_ids, completion.logprobs, completion.routed_experts):
        assert np.shares_memory(each, body)


@pytest.mark.parametrize("kind", ["|u1", "<u2", ">u2"])
def test_routed_experts_in_any_order_of_axes_and_bytes_are_the_same_numbers(kind: str) -> None:
    for given in (EXPERTS.astype(kind), np.asfortranarray(EXPERTS.astype(kind))):
        np.testing.assert_array_equal(
            decode_completion(as_json(routed_experts=npy(given))).routed_experts, EXPERTS
        )


def test_no_routed_experts_are_none() -> None:
    assert decode_completion(as_json(routed_experts=None)).routed_experts is None


@pytest.mark.parametrize("experts", ["not base64", base64.b64encode(b"no array" * 99).decode()])
async def test_routed_experts_that_cannot_be_read_are_transient(experts: str) -> None:
    with pytest.raises(TransientRequestError, match="cannot read its response"):
        await generate(as_json(routed_experts=experts))
