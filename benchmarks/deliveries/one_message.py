"""The batch as one message: structs of Python lists, gathered, encoded in a thread and written to a file."""

import asyncio
import base64
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import orjson

from benchmarks.deliveries.requests import PROMPT, each_completion
from rollmill.tasks.serve.responses import Completion
from rollmill.tasks.serve.vllm_client import VllmClient


class Sample(msgspec.Struct):
    """One row."""

    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    experts: bytes
    shape: tuple[int, ...]

    @classmethod
    def of(cls, completion: Completion) -> "Sample":
        """Prompt and completion."""
        n, experts = len(completion.token_ids), completion.routed_experts
        assert experts is not None
        return cls(
            [*PROMPT.tolist(), *completion.token_ids.tolist()],
            [False] * len(PROMPT) + [True] * n,
            [0.0] * len(PROMPT) + completion.logprobs.tolist(),
            experts.tobytes(),
            experts.shape,
        )


def as_msgpack(samples: Sequence[Sample]) -> bytes:
    """MessagePack."""
    return msgspec.msgpack.encode(samples)


def as_json(samples: Sequence[Sample]) -> bytes:
    """JSON, routed experts in base64."""
    rows = [msgspec.structs.asdict(each) for each in samples]
    for row in rows:
        row["experts"] = base64.b64encode(row["experts"]).decode()
    return orjson.dumps(rows)


def from_msgpack(body: bytes) -> list[list[float]]:
    """The column of log-probabilities; a message has no columns, so all of it is decoded."""
    return [each.logprobs for each in msgspec.msgpack.decode(body, type=list[Sample])]


def from_json(body: bytes) -> list[list[float]]:
    """The same of JSON."""
    return [each["logprobs"] for each in orjson.loads(body)]


async def deliver(client: VllmClient, path: Path, encode: Callable[[Sequence[Sample]], bytes]) -> None:
    """Write the message."""
    samples: list[Sample] = []

    async def keep(number: int, completion: Completion) -> None:
        samples.append(Sample.of(completion))

    await each_completion(client, keep)
    await asyncio.to_thread(lambda: path.write_bytes(encode(samples)))


def read_back(path: Path, decode: Callable[[bytes], list[list[float]]]) -> dict[str, float]:
    """Seconds of the column."""
    started = time.perf_counter()
    np.concatenate([np.array(each, np.float32) for each in decode(path.read_bytes())])
    return {"read_column_s": time.perf_counter() - started}
