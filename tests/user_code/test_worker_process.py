"""A worker process: what its requests get, and what ends with it."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollmill.tasks.errors import ForeignError, WorkerDiedError, WorkerTimeoutError
from rollmill.tasks.user_code.worker_main import MessageKind
from rollmill.tasks.user_code.worker_process import WorkerProcess

PATIENCE_S = 60.0

SEQUENTIAL = """
import os, time
from rollmill.tasks.user_code.worker_main import serve

def create(settings):
    if settings == b"broken":
        raise LookupError("no settings")
    def handle(body):
        if body == b"fork":
            reader, writer = os.pipe()
            if not (child := os.fork()):
                os.write(writer, b".")
                time.sleep(600)
            os.read(reader, 1)  # the child runs, so it has closed the connection
            return f"{os.getpid()} {child}".encode()
        if body == b"print":
            print("printed")
        if body == b"raise":
            raise LookupError("no such request")
        return settings + body
    return handle

serve(create)
"""

CONCURRENT = """
import asyncio
from rollmill.tasks.user_code.concurrent_worker import serve_concurrently

def create(settings):
    asyncio.run(asyncio.sleep(0))
    cancelled = []
    async def handle(body):
        try:
            await asyncio.sleep(600 if body == b"slow" else 0)
        except asyncio.CancelledError:
            cancelled.append(body)
            raise
        return b" ".join(cancelled) + b"."
    return handle

serve_concurrently(create)
"""


@asynccontextmanager
async def start(script: str, folder: Path, settings: bytes = b"") -> AsyncIterator[WorkerProcess]:
    command = (sys.executable, "-c", script)
    worker = await WorkerProcess.start("w", command, settings, log=folder / "log", stop_grace_s=0.0)
    try:
        await worker.wait_until_ready(PATIENCE_S)
        yield worker
    finally:
        await worker.stop()


async def ask(worker: WorkerProcess, body: bytes, timeout_s: float = PATIENCE_S) -> bytes:
    return await worker.receive(worker.send(body), timeout_s)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_request_gets_its_answer_or_the_error_of_user_code_and_prints_go_to_the_log(
    tmp_path: Path,
) -> None:
    async with start(SEQUENTIAL, tmp_path, b"a") as worker:
        assert await asyncio.gather(ask(worker, b"b"), ask(worker, b"c" * 500_000)) == [
            b"ab",
            b"a" + b"c" * 500_000,
        ]
        with pytest.raises(ForeignError, match="no such request") as raised:
            await ask(worker, b"raise")
        assert raised.value.kind == "LookupError"
        assert await ask(worker, b"print") == b"aprint"
        assert worker.log_tail() == "printed"
    with pytest.raises(WorkerDiedError, match="w ended with"):
        await ask(worker, b"b")


async def test_a_handler_that_cannot_be_created_is_an_error_of_user_code_and_its_frames_are_in_the_log(
    tmp_path: Path,
) -> None:
    with pytest.raises(ForeignError, match="no settings"):
        async with start(SEQUENTIAL, tmp_path, b"broken"):
            pass
    assert "in create" in (tmp_path / "log").read_text()


async def test_an_idle_worker_that_is_killed_is_known_to_be_dead_and_what_it_forked_ends(
    tmp_path: Path,
) -> None:
    async with start(SEQUENTIAL, tmp_path) as worker:
        pid, child = map(int, (await ask(worker, b"fork")).split())
        assert not worker.is_dead
        os.kill(pid, signal.SIGKILL)
        while is_alive(pid):
            time.sleep(0.001)  # noqa: ASYNC251 - the event loop must not learn of it
        assert worker.is_dead
        async with asyncio.timeout(PATIENCE_S):
            assert await worker.ended == "ended with signal SIGKILL"
        assert not is_alive(child)


async def test_a_request_that_is_given_up_is_cancelled_in_the_worker_and_the_others_are_not(
    tmp_path: Path,
) -> None:
    async with start(CONCURRENT, tmp_path) as worker:
        other = worker.send(b"slow")
        assert await ask(worker, b"") == b"."
        with pytest.raises(WorkerTimeoutError, match="w: no answer within"):
            await ask(worker, b"slow", timeout_s=0.01)
        assert await ask(worker, b"") == b"slow."
        assert await worker.receive(worker.send(b"", MessageKind.PING), PATIENCE_S) == b""
        assert not other.done()
    with pytest.raises(WorkerDiedError):
        await other
