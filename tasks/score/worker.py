"""A worker process: takes candidates from a socket, scores them, and answers with verdicts after each call.

Every message is its length in 4 bytes, big-endian, and a pickle: to the worker some Calls, from it the verdicts of
each in turn. The first one to it is the ScoreConfig as JSON instead. The first one that it sends goes out when the scorers are imported: empty, or the text of what went
wrong. The module imports nothing that its scorers do not need: a worker that was ended for a hanging call has to
be back soon.

    python -m tasks.score.worker PARENT_PID FD PATH...
"""

import ctypes
import os
import pickle
import signal
import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from io import BufferedRWPair
from typing import TypeAlias

from tasks.errors import text_of
from tasks.score.candidate import CandidateText
from tasks.score.function import ScoreFunction, function_at
from tasks.score.verdict import Verdict, judged

LENGTH_BYTES = 4
_PR_SET_PDEATHSIG = 1


Calls: TypeAlias = tuple[int, Sequence[Sequence[CandidateText]]]
"""A scorer's number among those of the worker, and its calls: a candidate for each, or those of a group."""


def framed(content: bytes) -> bytes:
    """A message with its length before it."""
    return len(content).to_bytes(LENGTH_BYTES, "big") + content


def serve(stream: BufferedRWPair, paths: Sequence[str]) -> None:
    """Answer calls until the other end closes."""
    try:
        settings = stream.read(int.from_bytes(stream.read(LENGTH_BYTES), "big"))
        functions = [function_at(path, lambda: _config(settings)) for path in paths]
        for function in functions:
            getattr(function.owner, "warm", _nothing)()
    except Exception as error:  # noqa: BLE001 - the flow raises it as its own
        _send(stream, f"{type(error).__name__}: {text_of(error)}".encode())
        return
    _send(stream, b"")
    while length := stream.read(LENGTH_BYTES):
        content: Calls = pickle.loads(stream.read(int.from_bytes(length, "big")))
        number, calls = content
        for candidates in calls:
            _send(stream, pickle.dumps(_scored(functions[number], candidates)))


def _config(settings: bytes) -> object:
    """The ScoreConfig, for a scorer that is made from it; imported for that one alone, since it takes its time."""
    return import_module("tasks.score.config").ScoreConfig.model_validate_json(settings)


def _scored(function: ScoreFunction, texts: Sequence[CandidateText]) -> list[Verdict]:
    def score() -> object:
        candidates = [text.parsed() for text in texts]
        return function.call(candidates if function.by_group else candidates[0])

    return judged(len(texts), function.by_group, score)


def _send(stream: BufferedRWPair, content: bytes) -> None:
    stream.write(framed(content))
    stream.flush()


def _nothing() -> None:
    """What a scorer without `warm` does to get ready."""


def _end_with(parent_pid: int) -> None:
    """Be killed by the kernel when the parent is gone, in the middle of a call too."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the flow was gone before this worker started")


def main(parent_pid: str, fd: str, *paths: str) -> None:
    """Serve the flow that started this process, and end with it."""
    _end_with(int(parent_pid))
    connection = socket.socket(fileno=int(fd))
    connection.set_inheritable(False)
    with connection, connection.makefile("rwb") as stream:
        serve(stream, paths)


if __name__ == "__main__":
    main(*sys.argv[1:])
