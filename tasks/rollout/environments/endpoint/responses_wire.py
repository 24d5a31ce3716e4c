"""Convert requests of OpenAI's responses API to chat requests, and messages of the policy to its responses; pure functions."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollmill.tasks.errors import EpisodeError
from rollmill.tasks.rollout.environment import TokenCounts
from rollmill.tasks.rollout.environments.endpoint.chat_wire import (
    MODEL,
    Wire,
    check_form,
    new_id,
    write_events,
)

# Fields that are converted here, or that keep what is not kept: a response lives as long as its episode.
CONVERTED = frozenset({"input", "instructions", "tools", "text", "previous_response_id", "store"})
PLAIN_TEXT = {"type": "text"}


class _ResponsesRequest(msgspec.Struct):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


def check_request(body: Wire) -> None:
    """Refuse a request of another form than OpenAI's responses; raises EpisodeError."""
    check_form(body, _ResponsesRequest)


def chat_request(body: Wire, before: Sequence[Wire] = ()) -> dict[str, Any]:
    """Convert a request to one of chat completions.

    Args:
        body: the request.
        before: the conversation of the response that it continues, with the response; without instructions.

    Raises:
        EpisodeError: it asks for something other than text and functions.
    """
    form = (body.get("text") or {}).get("format") or PLAIN_TEXT
    if form != PLAIN_TEXT:
        raise EpisodeError(
            f"a request has text.format = {form!r:.200}; set rollout.sampling.structured_output instead"
        )
    system = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    rest = {name: value for name, value in body.items() if name not in CONVERTED}
    return {
        **rest,
        "messages": [*system, *before, *input_messages(body["input"])],
        "tools": [_chat_tool(each) for each in body.get("tools") or ()],
    }


def input_messages(given: str | Sequence[Wire]) -> list[dict[str, Any]]:
    """Convert the input of a request, a text or a list of items, to chat messages.

    Example: "47+38=" is [{"role": "user", "content": "47+38="}].

    Raises:
        EpisodeError: an item is neither a message, a call of a function, its answer nor reasoning.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for item in given:
        kind = item.get("type") or "message"
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _join_parts(item.get("content"))})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            answer = _join_parts(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": answer})
        elif kind != "reasoning":
            raise EpisodeError(
                f"an item of the input has type {kind}; messages, function calls and their outputs can be sampled from"
            )
    return messages


def _join_parts(content: object) -> object:
    """Return text, or parts with the type that chat completions have for it."""
    if not isinstance(content, list):
        return content
    texts = ("input_text", "output_text")
    return [
        {**part, "type": "text"} if isinstance(part, Mapping) and part.get("type") in texts else part
        for part in content
    ]


def _chat_tool(tool: Wire) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise EpisodeError(
            f"a request has the tool {tool!r:.200}; only functions of the program can be called"
        )
    function = {
        name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None
    }
    return {"type": "function", "function": function}


def response(output: Sequence[Wire], counts: TokenCounts, body: Wire) -> dict[str, Any]:
    """Return the response to a request `body` with these items of output."""
    n_input, n_output = counts
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "model": MODEL,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": {},
        "output": list(output),
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": None,
        "tool_choice": "auto",
        "tools": list(body.get("tools") or ()),
        "top_p": None,
        "usage": {
            "input_tokens": n_input,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": n_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": n_input + n_output,
        },
    }


def output_items(message: Wire) -> list[dict[str, Any]]:
    """Return a chat message of the policy as items of a response: its text, unless it only calls, then its calls."""
    output: list[dict[str, Any]] = []
    if message.get("content") or not message.get("tool_calls"):
        part: dict[str, Any] = {
            "type": "output_text",
            "text": message.get("content") or "",
            "annotations": [],
            "logprobs": [],
        }
        output.append(
            {
                "type": "message",
                "id": new_id("msg"),
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    for call in message.get("tool_calls") or ():
        called = {"type": "function_call", "id": new_id("fc"), "call_id": call["id"], "status": "completed"}
        output.append({**called, **call["function"]})
    return output


def response_events(answer: Wire) -> bytes:
    """Encode a response as the server-sent events of a stream, each text and each call in one part."""
    begun = {**answer, "status": "in_progress", "output": []}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for number, item in enumerate(answer["output"]):
        at: dict[str, Any] = {"output_index": number, "item_id": item["id"]}
        is_message = item["type"] == "message"
        empty = {**item, "status": "in_progress", **({"content": []} if is_message else {"arguments": ""})}
        events.append({"type": "response.output_item.added", "output_index": number, "item": empty})
        events += _message_events(item, at) if is_message else _call_events(item, at)
        events.append({"type": "response.output_item.done", "output_index": number, "item": item})
    events.append({"type": "response.completed", "response": answer})
    numbered = [{**each, "sequence_number": number} for number, each in enumerate(events)]
    return write_events(numbered, named=True)


def _message_events(item: Wire, at: Wire) -> list[dict[str, Any]]:
    part = item["content"][0]
    at = {**at, "content_index": 0}
    return [
        {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
        {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []},
        {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []},
        {"type": "response.content_part.done", **at, "part": part},
    ]


def _call_events(item: Wire, at: Wire) -> list[dict[str, Any]]:
    arguments = item["arguments"]
    return [
        {"type": "response.function_call_arguments.delta", **at, "delta": arguments},
        {"type": "response.function_call_arguments.done", **at, "name": item["name"], "arguments": arguments},
    ]
