"""Prefect's server as `rollmill up` runs it: on loopback, and closed to pages of other sites in the user's browser.

Whoever may call the server runs programs as the user, through a deployment's job variables. Prefect's own settings leave a
page of another site two ways: CORS and CSRF tokens do not apply to WebSockets, nor to a page whose own name resolves to
127.0.0.1 (DNS rebinding). The guard checks the headers that a page cannot choose.
"""

import socket
import sys

import uvicorn
from prefect.server.api.server import create_app
from prefect.settings import get_current_settings
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from rollmill.tasks.processes.browser_requests import find_refusal
from rollmill.tasks.processes.priority import lower_priority


class BrowserGuard:
    """ASGI middleware that refuses what pages of other sites send: 403 for HTTP and for a WebSocket."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it to the application."""
        if scope["type"] == "lifespan" or not (reason := _find_refusal(scope)):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocketClose(reason=reason)(scope, receive, send)
        else:
            await PlainTextResponse(f"{reason}\n", 403)(scope, receive, send)


def _find_refusal(scope: Scope) -> str:
    return find_refusal("this Prefect server", scope.get("method", ""), Headers(scope=scope))


def main() -> None:
    """Run the server in the foreground at a low priority, on the listening socket whose file descriptor is the first argument.

    Recording a step's task runs takes as much CPU as the step's rollouts, and may wait for them.
    """
    lower_priority()
    settings = get_current_settings().server
    config = uvicorn.Config(
        BrowserGuard(create_app(final=True)),
        timeout_keep_alive=settings.api.keepalive_timeout,
        log_level=settings.logging_level.lower(),
    )
    # The option `fd` of uvicorn takes the socket for a Unix socket, which leaves TCP's delay of small packets on.
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(sys.argv[1]))])


if __name__ == "__main__":
    main()
