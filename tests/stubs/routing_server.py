"""A vLLM server that answers every generation at once with many tokens and their routed experts: `python -m ... PORT`.

Its answers are made before it listens, as vLLM writes them: JSON with the base64 of a .npy file, or, where those are
accepted, the arrays of our plugin.
"""

import asyncio
import base64
import io
import signal
import sys
from dataclasses import dataclass

import msgspec
import numpy as np
from aiohttp import web

from rollmill.tasks.serve.responses import ARRAYS

N_PROMPT, N_TOKENS, N_LAYERS, TOP_K = 600, 23_600, 48, 8
"""Tokens of the prompt, of all, and routed experts a token: 9.06 MB a row, 1.16 GB for 128."""
N_ANSWERS = 4
"""Different answers, given in turn."""


@dataclass(frozen=True)
class Made:
    token_ids: np.ndarray
    logprobs: np.ndarray
    experts: np.ndarray

    @classmethod
    def by(cls, seed: int) -> "Made":
        random = np.random.default_rng(seed)
        n = N_TOKENS - N_PROMPT
        return cls(
            random.integers(0, 150_000, n, np.int32),
            -random.random(n, np.float32),
            random.integers(0, 128, (N_TOKENS - 1, N_LAYERS, TOP_K), np.uint8),
        )

    def as_json(self) -> bytes:
        file = io.BytesIO()
        np.save(file, self.experts)
        pairs = zip(self.token_ids.tolist(), self.logprobs.astype(float).tolist(), strict=True)
        content = [{"token_id": i, "logprob": p, "rank": 1, "top_logprobs": []} for i, p in pairs]
        choice = {
            "index": 0,
            "logprobs": {"content": content},
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": self.token_ids.tolist(),
            "routed_experts": base64.b64encode(file.getvalue()).decode(),
            "weight_versions": [{"version": "run:1:0", "start": 0, "end": len(self.token_ids)}],
        }
        return msgspec.json.encode({"request_id": "r", "choices": [choice], "prompt_logprobs": None})

    def as_arrays(self) -> bytes:
        return msgspec.msgpack.encode(
            {
                "token_ids": self.token_ids.tobytes(),
                "logprobs": self.logprobs.tobytes(),
                "finish_reason": "length",
                "weight_versions": [{"version": "run:1:0", "start": 0, "end": len(self.token_ids)}],
                "routed_experts": self.experts.tobytes(),
                "routed_shape": self.experts.shape,
                "routed_dtype": "|u1",
            }
        )


async def serve(port: int, *, offers_arrays: bool) -> None:
    made = [Made.by(seed) for seed in range(N_ANSWERS)]
    bodies = [each.as_arrays() if offers_arrays else each.as_json() for each in made]

    async def generate(request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read())
        body = bodies[asked["sampling_params"]["seed"] % N_ANSWERS]
        return web.Response(body=body, content_type=ARRAYS if offers_arrays else "application/json")

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    application = web.Application()
    application.add_routes([web.get("/health", health), web.post("/inference/v1/generate", generate)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await ended.wait()
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), offers_arrays=sys.argv[2] == "arrays"))
