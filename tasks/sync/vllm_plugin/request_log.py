"""A log of a vLLM server's chats, which `rollmill import` reads.

ROLLMILL_REQUEST_LOG=logs vllm serve MODEL --middleware rollmill.tasks.sync.vllm_plugin.request_log.RequestLog

Each answer of /v1/chat/completions, streamed or not, is a line of a file logs/DATE-*.jsonl of the server, written when the client has it.
"""

import json
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from rollmill.tasks.sync.vllm_plugin.server_routes import App, Receive, Scope, Send

FOLDER_ENV = "ROLLMILL_REQUEST_LOG"
CHAT_PATH = "/v1/chat/completions"
_LOG = logging.getLogger(__name__)
REASONING = ("reasoning_content", "reasoning")
_EVENT = b"data: "


class RequestLog:
    """ASGI middleware that writes each chat request and its answer to a file, as one line of JSON.

    A chat that cannot be written is served all the same, and the server's log says why.

    Raises:
        KeyError: the variable ROLLMILL_REQUEST_LOG is not set.
        OSError: its folder cannot be made.
    """

    def __init__(self, app: App) -> None:
        self._app, self._folder = app, Path(os.environ[FOLDER_ENV])
        # Servers in containers have the same process id, and may write to one folder.
        self._name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._folder.mkdir(parents=True, exist_ok=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != CHAT_PATH:
            await self._app(scope, receive, send)
            return
        asked, answered, status = bytearray(), bytearray(), 0

        async def read() -> Any:
            message = await receive()
            asked.extend(message.get("body", b""))
            return message

        async def write(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)
            answered.extend(message.get("body", b""))

        begun, started = datetime.now(UTC), time.perf_counter()
        await self._app(scope, read, write)
        if status == 200:
            self._append(bytes(asked), bytes(answered), begun, time.perf_counter() - started)

    def _append(self, asked: bytes, answered: bytes, begun: datetime, duration_s: float) -> None:
        try:
            measured = {"started_at": begun.isoformat(), "duration_s": round(duration_s, 6)}
            lines = [json.dumps(each | measured) + "\n" for each in list_chats(asked, answered)]
            # One write a request: lines of concurrent requests do not mix.
            with (self._folder / f"{begun:%Y-%m-%d}-{self._name}.jsonl").open("a") as file:
                file.write("".join(lines))
        except (OSError, ValueError, LookupError, TypeError) as error:
            _LOG.warning("a chat is not in %s: %s: %s", self._folder, type(error).__name__, error)


def list_chats(asked: bytes, answered: bytes) -> Iterator[dict[str, Any]]:
    """Yield a line of the log for each choice of an answer to a chat request, given the bodies of both.

    Raises:
        ValueError: a body has another form than OpenAI's.
    """
    request: Mapping[str, Any] = json.loads(asked)
    if request.get("continue_final_message"):
        raise ValueError("the client wrote the beginning of the answer")
    completion = (
        _join_events(answered) if request.get("stream") else ChatCompletion.model_validate_json(answered)
    )
    many = len(completion.choices) > 1
    for choice in completion.choices:
        if not choice.finish_reason:
            raise ValueError("the streamed answer was broken off")
        # vLLM adds the field of reasoning to OpenAI's message.
        said = choice.message.model_dump(exclude_none=True)
        said = {name: said[name] for name in ("role", "content", *REASONING) if said.get(name)}
        if calls := [each.model_dump(exclude_none=True) for each in choice.message.tool_calls or ()]:
            said["tool_calls"] = [{name: each[name] for name in ("id", "type", "function")} for each in calls]
        line = {
            "id": f"{completion.id}-{choice.index}" if many else completion.id,
            "model": completion.model,
            "messages": [*request["messages"], said],
            "finish_reason": choice.finish_reason,
        }
        yield line | ({"tools": request["tools"]} if request.get("tools") else {})


def _join_events(answered: bytes) -> ChatCompletion:
    """Join the events of a streamed answer; ValueError if there is none."""
    events = [line.removeprefix(_EVENT) for line in answered.splitlines() if line.startswith(_EVENT)]
    chunks = [ChatCompletionChunk.model_validate_json(each) for each in events if each != b"[DONE]"]
    if not chunks:
        raise ValueError("the streamed answer is empty")
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(chunk)
    return state.current_completion_snapshot
