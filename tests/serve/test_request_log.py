"""The log of a server's chats: a line for each answer, streamed or not, that `rollmill import` reads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.testclient import TestClient

from rollmill.tasks.rollout.chat_logs.log_files import read_logs
from rollmill.tasks.sync.vllm_plugin.request_log import FOLDER_ENV, RequestLog

ASKED = {"role": "user", "content": "2+2="}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
SHARED = {"id": "chat-1", "created": 1, "model": "qwen"}


def completion(*messages: dict[str, Any]) -> dict[str, Any]:
    choices = [
        {"index": at, "message": {"role": "assistant", "content": None} | each, "finish_reason": "stop"}
        for at, each in enumerate(messages)
    ]
    return SHARED | {"object": "chat.completion", "choices": choices}


def events(*deltas: dict[str, Any], end: str | None = "length") -> list[str]:
    parts: list[tuple[dict[str, Any], str | None]] = [(each, None) for each in deltas]
    chunks = [
        SHARED
        | {
            "object": "chat.completion.chunk",
            "choices": [{"index": 0, "delta": delta, "finish_reason": reason}],
        }
        for delta, reason in (*parts, *([({}, end)] if end else []))
    ]
    return [*(f"data: {json.dumps(each)}\n\n" for each in chunks), *(["data: [DONE]\n\n"] if end else [])]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Send a request to a server that gives this answer; returns the lines of its log."""
    monkeypatch.setenv(FOLDER_ENV, str(tmp_path / "chats"))

    def served(request: dict[str, Any], answer: Response, path: str = "/v1/chat/completions") -> list[Any]:
        app = FastAPI()
        app.add_middleware(RequestLog)

        async def respond(asked: Request) -> Response:
            assert await asked.json() == request
            return answer

        app.add_api_route(path, respond, methods=["POST"])
        response = TestClient(app).post(path, json=request)
        assert response.status_code == answer.status_code
        files = sorted((tmp_path / "chats").iterdir())
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    return served


def test_each_choice_is_a_line(serve: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    request = {"messages": [ASKED], "tools": [tool], "n": 2}
    lines = serve(request, JSONResponse(completion({"content": "4"}, {"tool_calls": [CALL]})))
    assert [each["id"] for each in lines] == ["chat-1-0", "chat-1-1"]
    assert lines[0]["messages"] == [ASKED, {"role": "assistant", "content": "4"}]
    assert lines[1]["messages"][1]["tool_calls"][0]["function"] == CALL["function"]
    found = read_logs([str(tmp_path / "chats")]).conversations
    assert [each.log_id for each in found] == ["chat-1-0", "chat-1-1"]
    assert found[0].tools == (tool,)
    assert found[0].started_at is not None


def test_a_streamed_answer_is_joined(serve: Callable[..., list[dict[str, Any]]]) -> None:
    parts = events({"role": "assistant", "content": ""}, {"content": "It "}, {"content": "is 4."})
    (line,) = serve({"messages": [ASKED], "stream": True}, StreamingResponse(iter(parts)))
    assert line["messages"][1] == {"role": "assistant", "content": "It is 4."}
    assert (line["finish_reason"], line["model"]) == ("length", "qwen")


def test_calls_of_a_streamed_answer_have_the_form_of_those_of_a_whole_one(
    serve: Callable[..., list[dict[str, Any]]],
) -> None:
    parts = events({"role": "assistant", "tool_calls": [{"index": 0} | CALL]}, end="tool_calls")
    (line,) = serve({"messages": [ASKED], "stream": True}, StreamingResponse(iter(parts)))
    assert line["messages"][1]["tool_calls"] == [CALL]


def test_reasoning_is_logged_and_an_answer_that_the_client_began_is_not(
    serve: Callable[..., list[dict[str, Any]]],
) -> None:
    answer = completion({"content": "4", "reasoning_content": "two and two"})
    (line,) = serve({"messages": [ASKED]}, JSONResponse(answer))
    assert line["messages"][1]["reasoning_content"] == "two and two"
    begun = {"messages": [ASKED, {"role": "assistant", "content": "It"}], "continue_final_message": True}
    assert serve(begun, JSONResponse(answer)) == [line]


@pytest.mark.parametrize(
    "answer",
    [
        JSONResponse({"error": "no"}, status_code=400),
        JSONResponse({"surprise": 1}),
        StreamingResponse(iter(events({"content": "It "}, end=None))),
        StreamingResponse(iter([])),
    ],
    ids=["refused", "another form", "broken off", "empty"],
)
def test_what_is_no_whole_answer_is_served_and_not_logged(
    serve: Callable[..., list[dict[str, Any]]], answer: Response
) -> None:
    request = {"messages": [ASKED], "stream": isinstance(answer, StreamingResponse)}
    assert serve(request, answer) == []


def test_other_routes_are_not_logged(serve: Callable[..., list[dict[str, Any]]]) -> None:
    assert serve({"input": "2+2="}, JSONResponse({"data": []}), "/v1/embeddings") == []
