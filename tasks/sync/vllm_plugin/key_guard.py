"""Requires a server's API key on every route.

vLLM requires it on /v1, /v2, /inference and /cohere alone. That leaves routes open that control a server: /pause,
/collective_rpc, /update_weights, /rollmill/weights.
"""

import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})
"""Routes of load balancers and monitors, which neither show nor change the model."""


def read_keys(args: Any) -> tuple[str, ...]:
    """Read the API keys of a vLLM server: those of --api-key, else the one of VLLM_API_KEY; empty if there is none."""
    given = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    return tuple(key for key in given if key)


class KeyGuard:
    """ASGI middleware that answers 401 to requests without a key, if the application's `state.rollmill_keys` has any."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request that has a key, or needs none, to the application; answer 401 to others."""
        if scope["type"] not in ("http", "websocket") or _may_pass(scope):
            await self._app(scope, receive, send)
        else:
            answer = JSONResponse({"error": "this route needs the server's API key"}, status_code=401)
            await answer(scope, receive, send)


def _may_pass(scope: Scope) -> bool:
    keys: Sequence[str] = getattr(scope["app"].state, "rollmill_keys", ())
    if not keys or scope["path"].removeprefix(scope.get("root_path", "")) in OPEN_PATHS:
        return True
    given = dict(scope["headers"]).get(b"authorization", b"")
    return any(secrets.compare_digest(given, f"Bearer {key}".encode()) for key in keys)
