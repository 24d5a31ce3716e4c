"""The server of synthetic traffic, a program: `python -m ... PORT TOKENS_PER_ANSWER`."""

import asyncio
import json
import random
import sys

from aiohttp import web

LEAST_S, MOST_S = 0.5, 1.5
LOGPROB = -1.0


def build_app(n_tokens: int) -> web.Application:
    """Build a web application that answers every completion request with `n_tokens` tokens after 0.5 to 1.5 s."""
    choice = {
        "token_ids": list(range(n_tokens)),
        "logprobs": {"content": [{"logprob": LOGPROB}] * n_tokens},
        "finish_reason": "stop",
        "weight_versions": [{"version": "synthetic", "start": 0, "end": n_tokens}],
    }
    answer = json.dumps({"choices": [choice]}).encode()

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        # In place of the time that a model takes.
        await asyncio.sleep(random.uniform(LEAST_S, MOST_S))
        return web.Response(body=answer, content_type="application/json")

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_post("/inference/v1/generate", generate)
    return app


if __name__ == "__main__":
    web.run_app(build_app(int(sys.argv[2])), host="127.0.0.1", port=int(sys.argv[1]), print=None)
