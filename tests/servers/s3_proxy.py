"""A proxy before an S3 server that notes every request, answers a share with an error, and may take headers away."""

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import ClientSession, web

NOT_PASSED_ON = {"host", "transfer-encoding", "connection"}


class FailingProxy:
    """Passes requests on to `target`.

    Attributes:
        url: where it listens.
        requests: each request as "METHOD path", failed ones too.
        share: of the requests that fail, 0 to 1.
        taken_away: names of headers, in small letters, that the server does not get.
    """

    def __init__(self, target: str, share: float) -> None:
        self.url, self.share = "", share
        self.requests: list[str] = []
        self.taken_away: set[str] = set()
        self._target, self._random = target, random.Random(0)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path_qs}")
        body = await request.read()
        how = self._random.choice(["refuse", "throttle", "cut", "answer lost"])
        fails = self._random.random() < self.share
        if fails and how == "refuse":
            return web.Response(status=503, text="<Error><Code>SlowDown</Code></Error>")
        if fails and how == "throttle":
            return web.Response(status=429, text="<Error><Code>Throttling</Code></Error>")
        if fails and how == "cut":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        left_out = NOT_PASSED_ON | self.taken_away
        headers = {k: v for k, v in request.headers.items() if k.lower() not in left_out}
        async with (
            ClientSession(auto_decompress=False) as session,
            session.request(
                request.method, self._target + request.path_qs, data=body, headers=headers
            ) as answer,
        ):
            content = await answer.read()
        if fails:
            assert request.transport is not None
            request.transport.close()
        kept = {
            k: v for k, v in answer.headers.items() if k.lower() not in NOT_PASSED_ON | {"content-length"}
        }
        if request.method == "HEAD":
            kept["Content-Length"] = answer.headers.get("Content-Length", "0")
        return web.Response(status=answer.status, body=content, headers=kept)

    @contextmanager
    def running(self) -> Iterator["FailingProxy"]:
        loop, is_up = asyncio.new_event_loop(), threading.Event()
        stopped = asyncio.Event()

        async def serve() -> None:
            app = web.Application(client_max_size=1 << 30)
            app.router.add_route("*", "/{path:.*}", self._answer)
            runner = web.AppRunner(app, handle_signals=False, auto_decompress=False)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = "http://{}:{}".format(*runner.addresses[0][:2])
            is_up.set()
            await stopped.wait()
            await runner.cleanup()

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
        thread.start()
        assert is_up.wait(30)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(stopped.set)
            thread.join()
            loop.close()
