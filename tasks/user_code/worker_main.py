"""Main loop of a worker process that runs user code, and the messages between it and the process that started it.

A message is a header, which holds the length of the body in bytes, the number of the request and the kind, and a body of
bytes. All messages of a worker use one socket, whose file descriptor is the last argument of the worker's command line. The first
request creates the handler of the following ones. A worker ends when the other end of the socket is closed.
"""

import os
import resource
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from enum import IntEnum
from typing import TypeAlias, TypeVar

from rollmill.tasks.errors import RollmillError, describe_error

# Not msgspec: importing it takes as long as starting the rest of a scorer's worker, and a replacement must start fast.
HEADER = struct.Struct(">IIB")

MEMORY_LIMIT_BYTES = 4 << 30
"""How much memory a worker, or a process that it starts, may allocate: an answer such as 2^(10^11) must not take the machine's."""

Created = TypeVar("Created")
Handler: TypeAlias = Callable[[bytes], bytes]
"""Takes the body of a request and returns the body of its answer."""


class MessageKind(IntEnum):
    """Kind of a message: REQUEST, CANCEL and PING are sent to a worker, ANSWER and RAISED by it."""

    REQUEST = 0
    CANCEL = 1
    PING = 2
    ANSWER = 3
    RAISED = 4


def make_frame(number: int, kind: MessageKind, body: bytes = b"") -> bytes:
    """Encode a message as bytes: a header with body length, request number and kind, then the body."""
    return HEADER.pack(len(body), number, kind) + body


def frame_error(number: int, error: BaseException) -> bytes:
    """Return the answer to a request whose handler raised: type and text of the error."""
    return make_frame(number, MessageKind.RAISED, "\n".join(describe_error(error)).encode())


def serve(create: Callable[[bytes], Handler]) -> None:
    """Handle requests one after another until the other end closes the socket.

    A cancelled request is handled all the same: only the end of the process stops a function that computes.

    Args:
        create: takes the body of the first request, and returns the handler of all later ones.
    """
    with open_connection() as connection:
        handler = create_handler(connection, create)
        while message := receive(connection):
            number, kind, body = message
            if kind == MessageKind.REQUEST:
                try:
                    answer = make_frame(number, MessageKind.ANSWER, handler(body))
                except Exception as error:  # noqa: BLE001 - user code: whoever sent the request receives it
                    answer = frame_error(number, error)
                connection.sendall(answer)


def open_connection() -> socket.socket:
    """Open the socket to the process that started this one, limit memory, and redirect standard output to standard error."""
    limit_memory()
    # What user code prints must not appear in the output of a command, which may be JSON.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    connection = socket.socket(fileno=int(sys.argv[-1]))
    connection.set_inheritable(False)
    # A child that user code forks would otherwise hold the connection open after this process is dead.
    os.register_at_fork(after_in_child=lambda: _close_in_child(connection))
    return connection


def limit_memory() -> None:
    """Limit the memory of this process, and of each process it starts, to MEMORY_LIMIT_BYTES.

    An allocation beyond it raises MemoryError, or ends the process if its code does not handle the failure.
    """
    # Private writable memory. RLIMIT_AS would count what CUDA and mapped files reserve, too. The soft limit alone, so that
    # user code that needs more may raise it.
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [each for each in (soft, hard) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([MEMORY_LIMIT_BYTES, *limits]), hard))


def _close_in_child(connection: socket.socket) -> None:
    if (descriptor := connection.detach()) >= 0:
        os.close(descriptor)


def create_handler(connection: socket.socket, create: Callable[[bytes], Created]) -> Created:
    """Create the handler with the first request, and answer it; ends this process if that fails."""
    message = receive(connection)
    if message is None:
        sys.exit("the flow was gone before this worker started")
    number, _, settings = message
    try:
        handler = create(settings)
    except Exception as error:  # noqa: BLE001 - user code: whoever started this process receives it
        if not isinstance(error, RollmillError):
            traceback.print_exc()
        connection.sendall(frame_error(number, error))
        sys.exit(1)
    connection.sendall(make_frame(number, MessageKind.ANSWER))
    return handler


def receive(connection: socket.socket) -> tuple[int, int, bytes] | None:
    """Receive a message: number of the request, kind and body; None if the other end has closed the socket."""
    header = _receive_exactly(connection, HEADER.size)
    if header is None:
        return None
    length, number, kind = HEADER.unpack(header)
    body = _receive_exactly(connection, length)
    return None if body is None else (number, kind, body)


def _receive_exactly(connection: socket.socket, n_bytes: int) -> bytes | None:
    content = bytearray(n_bytes)
    free = memoryview(content)
    while free:
        n_received = connection.recv_into(free)
        if not n_received:
            return None
        free = free[n_received:]
    return bytes(content)
