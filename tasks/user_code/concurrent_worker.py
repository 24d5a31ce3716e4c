"""Main loop of a worker process whose user code is asynchronous: requests are handled concurrently and can be cancelled."""

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from rollmill.tasks.user_code.worker_main import (
    HEADER,
    MessageKind,
    create_handler,
    frame_error,
    make_frame,
    open_connection,
)

AsyncHandler: TypeAlias = Callable[[bytes], Awaitable[bytes]]
"""Takes the body of a request and returns the body of its answer."""


def serve_concurrently(create: Callable[[bytes], AsyncHandler]) -> None:
    """Handle requests as concurrent tasks until SIGTERM, or until the other end closes the socket.

    Args:
        create: takes the body of the first request, and returns the handler of all later ones.
    """
    connection = open_connection()
    # Before the event loop runs: user code may call asyncio.run while it is imported or created.
    handler = create_handler(connection, create)
    with suppress(asyncio.CancelledError):
        asyncio.run(_serve(connection, handler))


async def _serve(connection: socket.socket, handler: AsyncHandler) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    reader, writer = await asyncio.open_connection(sock=connection)
    running: dict[int, asyncio.Task[None]] = {}
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            length, number, kind = HEADER.unpack(await reader.readexactly(HEADER.size))
            body = await reader.readexactly(length)
            match kind:
                case MessageKind.REQUEST:
                    running[number] = loop.create_task(_answer(writer, handler, number, body))
                    running[number].add_done_callback(partial(_forget, running, number))
                case MessageKind.CANCEL if number in running:
                    running[number].cancel()
                case MessageKind.PING:
                    writer.write(make_frame(number, MessageKind.ANSWER))


def _forget(running: dict[int, asyncio.Task[None]], number: int, _: asyncio.Task[None]) -> None:
    del running[number]


async def _answer(writer: asyncio.StreamWriter, handler: AsyncHandler, number: int, body: bytes) -> None:
    try:
        answer = make_frame(number, MessageKind.ANSWER, await handler(body))
    except Exception as error:  # noqa: BLE001 - user code: whoever sent the request receives it
        answer = frame_error(number, error)
    writer.write(answer)
