"""HTTP connections to one server, for many concurrent requests, and the base of clients that use them.

Errors report by their type whether a retry may help.
"""

# aiohttp, not httpx: for every request httpx searches its whole pool, which costs seconds of CPU with 256 requests, and
# aiohttp a twentieth of a second.

import asyncio
import mmap
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Self, TypeAlias, TypeVar

import aiohttp
import numpy as np

from rollmill.tasks.errors import (
    ConnectionLostError,
    RequestError,
    ServiceStartError,
    TransientRequestError,
)
from rollmill.tasks.processes.launched_process import LaunchedProcess

Health = TypeVar("Health")

# An idle connection is not reused after this. Servers close idle ones too, vLLM by default after 5 s, and a request that
# meets the close would fail.
IDLE_S = 2.0

TRANSIENT_STATUSES = frozenset(
    {
        HTTPStatus.REQUEST_TIMEOUT,
        HTTPStatus.TOO_EARLY,
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.INTERNAL_SERVER_ERROR,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    }
)
SHOWN_CHARACTERS = 500
HEALTH_PAUSE_S = 0.2
"""Between two questions for the health of a service that is starting."""

LARGE_BYTES = 1 << 20
"""A body of this size (1 MiB) or more is received into one array; a smaller one is joined from its chunks."""
# A connection is read ahead up to this much (256 KiB): with less, a large body takes a thousand short callbacks of the event
# loop, with more, long ones.
RECEIVED_BYTES = 1 << 18

Body: TypeAlias = bytes | memoryview
"""A response body; a memoryview if it is large."""


class HttpConnection:
    """HTTP connections to one server, one for each concurrent request; opened at first use.

    Args:
        url: http://host:port, without a path.
        api_key: sent as a bearer token; empty: none.
        connect_timeout_s: seconds to open a connection.
    """

    def __init__(self, url: str, *, api_key: str, connect_timeout_s: float) -> None:
        self._url, self._connect_timeout_s = url, connect_timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections, so that running requests fail; the next request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def send(self, method: str, path: str, content: bytes, timeout_s: float, accept: str = "") -> Body:
        """Send a request and return the body of its response; `accept` is the requested media type, empty: any.

        Raises:
            ConnectionLostError: no connection, or it broke; the request may succeed at another server.
            TransientRequestError: no response within `timeout_s` seconds, or a busy or failing server; it may succeed later.
            RequestError: the request would fail again.
        """
        status, body = await self.ask(method, path, content, timeout_s, accept)
        if status < HTTPStatus.BAD_REQUEST:
            return body
        kind = TransientRequestError if status in TRANSIENT_STATUSES else RequestError
        text = bytes(body).decode(errors="replace")[:SHOWN_CHARACTERS]
        raise kind(f"{self._url}{path}: {status} {text}")

    async def ask(
        self, method: str, path: str, content: bytes, timeout_s: float, accept: str = ""
    ) -> tuple[int, Body]:
        """Send a request and return the status and body of its response, whatever the status.

        Raises the errors of `send` if there is no response.
        """
        headers = self._headers | ({"Accept": accept} if accept else {})
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._connect_timeout_s)
        try:
            async with self._get_session().request(
                method, self._url + path, data=content, headers=headers, timeout=timeout
            ) as response:
                return response.status, await _receive_body(response)
        except aiohttp.ConnectionTimeoutError as error:
            waited = f"no connection within {self._connect_timeout_s:g} s"
            raise ConnectionLostError(f"{self._url}{path}: {waited}") from error
        except TimeoutError as error:
            raise TransientRequestError(f"{self._url}{path}: no answer within {timeout_s:g} s") from error
        except aiohttp.InvalidURL as error:
            raise RequestError(f"{self._url}{path}: not an address") from error
        except aiohttp.ClientError as error:
            raise ConnectionLostError(f"{self._url}{path}: {error or type(error).__name__}") from error

    def _get_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # aiohttp queues requests above 100 connections by default; the flow has its own limit on requests.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
            self._session = aiohttp.ClientSession(connector=connector, read_bufsize=RECEIVED_BYTES)
        return self._session


class ServiceClient:
    """Base class of the clients of one service; an async context manager that closes the connections at its end.

    Args:
        url: http://host:port of the service.
        api_key: see `HttpConnection`.
        connect_timeout_s: see `HttpConnection`.
    """

    def __init__(self, url: str, *, api_key: str, connect_timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._connection = HttpConnection(self.url, api_key=api_key, connect_timeout_s=connect_timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, so that running requests fail; the next request opens new ones."""
        await self._connection.close()


async def wait_for_start(
    name: str,
    ask: Callable[[], Awaitable[Health | None]],
    process: LaunchedProcess | None,
    timeout_s: float,
    setting: str,
) -> Health:
    """Poll a service until it is healthy, and return its answer.

    Args:
        name: name of the service, for errors.
        ask: asks for its health; None means that it is not healthy yet.
        process: the launched process, whose log an error quotes; None: the service was not launched here.
        timeout_s: seconds until it must be healthy.
        setting: name of the setting with this limit.

    Raises:
        ServiceStartError: its process ended, or it was not healthy in time; with its last log lines.
    """
    deadline = time.monotonic() + timeout_s
    while (health := await ask()) is None:
        if process is not None and not process.is_running:
            reason = f"ended with status {process.returncode} while starting"
        elif time.monotonic() > deadline:
            reason = f"not healthy within {setting} = {timeout_s:g} s"
        else:
            await asyncio.sleep(HEALTH_PAUSE_S)
            continue
        raise ServiceStartError(name, reason, process.log_tail() if process is not None else "")
    return health


async def _receive_body(response: aiohttp.ClientResponse) -> Body:
    """Read the body of a response; a large body is read chunk by chunk into one array."""
    # aiohttp joins the chunks of a large body in one call, which would block the event loop.
    n_bytes = response.content_length or 0
    if n_bytes < LARGE_BYTES or response.headers.get("Content-Encoding", "identity") != "identity":
        return await response.read()
    body, end = np.empty(n_bytes, np.uint8), 0
    # The kernel clears new memory at the first write, 1 to 20 ms for each huge page of 2 MiB; NumPy releases the
    # interpreter's lock meanwhile.
    await asyncio.to_thread(body[:: mmap.PAGESIZE].fill, 0)
    async for piece in response.content.iter_any():
        body.data[end : end + len(piece)] = piece
        end += len(piece)
    return body.data
