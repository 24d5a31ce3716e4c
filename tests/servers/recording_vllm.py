"""ASGI middleware of a real vLLM server that records what it is asked to sample, and its own answers as JSON.

The server's `--middleware` names it; the environment variable RECORDED is the file, which gets a line for each request.
"""

import json
import os
import shlex
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

NAME = "recording_vllm.Recorder"
ROUTE = "/inference/v1/generate"

Event = MutableMapping[str, Any]
App = Callable[[Event, Callable[[], Awaitable[Event]], Callable[[Event], Awaitable[None]]], Awaitable[None]]


class Recorder:
    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(
        self, scope: Event, receive: Callable[[], Awaitable[Event]], send: Callable[[Event], Awaitable[None]]
    ) -> None:
        if scope.get("path") != ROUTE:
            await self._app(scope, receive, send)
            return
        asked, answered = bytearray(), bytearray()

        async def listen() -> Event:
            event = await receive()
            asked.extend(event.get("body", b""))
            return event

        async def answer(event: Event) -> None:
            answered.extend(event.get("body", b""))
            await send(event)

        # Without the client's `Accept` the answer is vLLM's, not that of Rollmill's plugin.
        headers = [(name, value) for name, value in scope["headers"] if name != b"accept"]
        await self._app({**scope, "headers": headers}, listen, answer)
        line = json.dumps({"asked": json.loads(asked), "answered": json.loads(answered or b"{}")}) + "\n"
        _append(line)


def _append(line: str) -> None:
    with Path(os.environ["RECORDED"]).open("a") as file:
        file.write(line)


def make_recording_python(python: Path, folder: Path, recorded: Path) -> Path:
    """Make a program for `serve.python` by which vLLM servers find this module and its file; `python` is that of vLLM's environment."""
    (folder / "bin").mkdir(parents=True)
    # By what is there Rollmill knows which build it is.
    (folder / "lib").symlink_to(python.parent.parent / "lib")
    script = folder / "bin" / "python"
    variables = f"PYTHONPATH={shlex.quote(str(Path(__file__).parent))} RECORDED={shlex.quote(str(recorded))}"
    script.write_text(f'#!/bin/sh\n{variables} exec {shlex.quote(str(python))} "$@"\n')
    script.chmod(0o700)
    return script
