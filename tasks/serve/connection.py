"""HTTP to one server: many small requests at once, and errors that say whether sending again may help.

aiohttp, because httpx's pool looks through all connections for every request: 256 at once cost it seconds of
CPU, aiohttp a twentieth of one.
"""

import asyncio
import mmap
from http import HTTPStatus
from typing import TypeAlias

import aiohttp
import numpy as np

from tasks.errors import ConnectionLostError, RequestError, TransientRequestError

IDLE_S = 2.0
"""An idle connection is not used again after this; servers close theirs after 5 s, vLLM's default."""

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

LARGE_BYTES = 1 << 20
"""A body of this size (1 MiB) or more is received in place; a smaller one is joined from its pieces."""
RECEIVED_BYTES = 1 << 18
"""A connection is read ahead up to this much (256 KiB): with less, a large body is a thousand small turns of the loop, with more, long ones."""

Body: TypeAlias = bytes | memoryview
"""What a server answers; a memoryview of bytes when it is large."""


class Connection:
    """Connections to one server, as many as requests are under way; opened at first use.

    Args:
        url: http://host:port, without a path.
        api_key: sent as a bearer token; empty: none.
        connect_timeout_s: seconds to open a connection.
        unix_socket: path of the socket that the server listens at instead of a port; empty: none.
    """

    def __init__(self, url: str, *, api_key: str, connect_timeout_s: float, unix_socket: str = "") -> None:
        self._url, self._connect_timeout_s, self._unix_socket = url, connect_timeout_s, unix_socket
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections: requests under way fail; they open again at the next one."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def send(self, method: str, path: str, content: bytes, timeout_s: float, accept: str = "") -> Body:
        """The body of the answer; `accept` is the form of it that is asked for, empty: any.

        Raises:
            ConnectionLostError: no connection, or it broke; sent again, to another server, it may succeed.
            TransientRequestError: the same with no answer within `timeout_s` seconds, a busy or failing server.
            RequestError: it would fail again.
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
        """The status and the body of the answer, whatever it is; raises as `send` when there is none."""
        headers = self._headers | ({"Accept": accept} if accept else {})
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._connect_timeout_s)
        try:
            async with self._opened().request(
                method, self._url + path, data=content, headers=headers, timeout=timeout
            ) as response:
                return response.status, await _received(response)
        except aiohttp.ConnectionTimeoutError as error:
            waited = f"no connection within {self._connect_timeout_s:g} s"
            raise ConnectionLostError(f"{self._url}{path}: {waited}") from error
        except TimeoutError as error:
            raise TransientRequestError(f"{self._url}{path}: no answer within {timeout_s:g} s") from error
        except aiohttp.InvalidURL as error:
            raise RequestError(f"{self._url}{path}: not an address") from error
        except aiohttp.ClientError as error:
            raise ConnectionLostError(f"{self._url}{path}: {error or type(error).__name__}") from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=self._connector(), read_bufsize=RECEIVED_BYTES)
        return self._session

    def _connector(self) -> aiohttp.BaseConnector:
        if self._unix_socket:
            return aiohttp.UnixConnector(self._unix_socket, limit=0, keepalive_timeout=IDLE_S)
        return aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)


async def _received(response: aiohttp.ClientResponse) -> Body:
    """The body; a large one piece by piece into its place, since joining the pieces would hold the loop up for long."""
    n_bytes = response.content_length or 0
    if n_bytes < LARGE_BYTES or response.headers.get("Content-Encoding", "identity") != "identity":
        return await response.read()
    body, end = np.empty(n_bytes, np.uint8), 0
    await asyncio.to_thread(_back, body)
    async for piece in response.content.iter_any():
        body.data[end : end + len(piece)] = piece
        end += len(piece)
    return body.data


def _back(memory: np.ndarray) -> None:
    """Write to each page of new memory, so that the system has provided it before the event loop writes there.

    A first write to fresh memory waits until the system has cleared it: 1 to 20 ms for each huge page of 2 MiB. NumPy gives
    the interpreter's lock back meanwhile.
    """
    memory[:: mmap.PAGESIZE] = 0
