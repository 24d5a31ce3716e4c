"""Where environments of the `verifiers` library find the policy: an OpenAI-compatible endpoint on loopback.

It holds each request until the flow has sampled the policy's next message.
"""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Self

from aiohttp import web

from tasks.errors import EpisodeError
from tasks.rollout.verifiers_wire import Wire, completion_of, events_of

SESSION_HEADER = "X-Session-ID"
"""By which the library says what trace a request belongs to."""
MOST_BODY_BYTES = 1 << 30

Ask = Callable[[Wire], Awaitable[Wire]]
"""Gives a request the policy's next message; EpisodeError refuses it."""


class PolicyEndpoint:
    """Answers each trace's requests by what is registered for it in `asked`."""

    def __init__(self) -> None:
        self.asked: dict[str, Ask] = {}
        self.url = ""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        application = web.Application(client_max_size=MOST_BODY_BYTES)
        application.add_routes([web.post("/v1/chat/completions", self._complete)])
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        self.url = f"http://{host}:{port}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _complete(self, request: web.Request) -> web.Response:
        trace = request.headers.get(SESSION_HEADER, "")
        ask = self.asked.get(trace)
        if ask is None:
            return _refusal(f"no episode is open for trace {trace!r}")
        body = await request.json()
        try:
            message = await ask(body)
        except EpisodeError as error:
            return _refusal(str(error))
        completion = completion_of(message, trace)
        if body.get("stream"):
            return web.Response(body=events_of(completion), content_type="text/event-stream")
        return web.json_response(completion)


def _refusal(text: str) -> web.Response:
    return web.json_response({"error": {"message": text, "type": "invalid_request_error"}}, status=400)
