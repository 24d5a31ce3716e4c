"""The server of synthetic traffic, a process of its own: PORT, and how many tokens an answer has."""

import asyncio
import json
import random
import sys

from aiohttp import web

LEAST_S, MOST_S = 0.5, 1.5
LOGPROB = -1.0


def app_of(n_tokens: int) -> web.Application:
    """Answers every completion with so many tokens, 0.5 to 1.5 s after it was asked for."""
    choice = {
        "token_ids": list(range(n_tokens)),
        "logprobs": {"content": [{"logprob": LOGPROB}] * n_tokens},
        "finish_reason": "stop",
        "weight_versions": [{"version": "synthetic", "start": 0, "end": n_tokens}],
    }
    answer = json.dumps({"choices": [choice]}).encode()

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(random.uniform(LEAST_S, MOST_S))  # stands for the time that a model takes
        return web.Response(body=answer, content_type="application/json")

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_post("/inference/v1/generate", generate)
    return app


if __name__ == "__main__":
    web.run_app(app_of(int(sys.argv[2])), host="127.0.0.1", port=int(sys.argv[1]), print=None)
