"""Convert requests of Anthropic's messages API to chat requests, and messages of the policy to its answers; pure functions."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollmill.tasks.errors import EpisodeError
from rollmill.tasks.rollout.environments.endpoint.chat_wire import (
    MODEL,
    Said,
    Wire,
    check_form,
    new_id,
    write_events,
)

CONVERTED = frozenset({"system", "messages", "tools", "tool_choice"})
THOUGHTS = ("thinking", "redacted_thinking")


class _MessagesRequest(msgspec.Struct):
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None


def chat_request(body: Wire) -> dict[str, Any]:
    """Convert a request to one of chat completions.

    Raises:
        EpisodeError: it asks for something other than text and tools of the program.
    """
    check_form(body, _MessagesRequest)
    system = [{"role": "system", "content": _join_texts(body["system"])}] if body.get("system") else []
    rest = {name: value for name, value in body.items() if name not in CONVERTED}
    kind = (body.get("tool_choice") or {}).get("type")
    return {
        **rest,
        **({} if kind is None else {"tool_choice": kind}),
        "messages": [*system, *(each for message in body["messages"] for each in _chat_messages(message))],
        "tools": [_chat_tool(each) for each in body.get("tools") or ()],
    }


def _chat_messages(message: Wire) -> list[dict[str, Any]]:
    """Convert one message, whose answers of tools become messages before its text."""
    role = message.get("role")
    if role not in ("user", "assistant"):
        raise EpisodeError(f"a message is no {{role: user or assistant, content}}: {message!r:.200}")
    blocks = _list_blocks(message.get("content"))
    texts = [each for each in blocks if each.get("type") not in ("tool_use", "tool_result", *THOUGHTS)]
    calls = [_chat_call(each) for each in blocks if each.get("type") == "tool_use"]
    answers = [
        {
            "role": "tool",
            "tool_call_id": each.get("tool_use_id"),
            "content": _join_texts(each.get("content") or ""),
        }
        for each in blocks
        if each.get("type") == "tool_result"
    ]
    if answers and not texts:
        return answers
    said: dict[str, Any] = {"role": role, "content": _join_texts(texts)}
    return [*answers, {**said, "tool_calls": calls} if calls else said]


def _list_blocks(content: object) -> list[Wire]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(each, Mapping) for each in blocks):
        raise EpisodeError(f"the content of a message is no text and no list of blocks: {content!r:.200}")
    return blocks


def _join_texts(content: object) -> str:
    blocks = _list_blocks(content)
    if other := [str(each.get("type")) for each in blocks if each.get("type") != "text"]:
        raise EpisodeError(f"a request has a block of type {other[0]}; only text can be sampled from")
    if not all(isinstance(each.get("text"), str) for each in blocks):
        raise EpisodeError(f"a block has no text: {blocks!r:.200}")
    return "".join(each["text"] for each in blocks)


def _chat_call(block: Wire) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"))}
    return {"id": block.get("id"), "type": "function", "function": function}


def _chat_tool(tool: Wire) -> dict[str, Any]:
    if (tool.get("type") or "custom") != "custom":
        raise EpisodeError(f"a request has the tool {tool!r:.200}; only tools of the program can be called")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {"type": "function", "function": {**function, **described}}


def message(said: Said) -> dict[str, Any]:
    """Return the answer whose content is the policy's message."""
    text, calls = said.message.get("content"), said.message.get("tool_calls") or ()
    content: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    content += [_tool_use(each) for each in calls]
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": content,
        "stop_reason": "tool_use" if calls else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": said.counts.prompt, "output_tokens": said.counts.completion},
    }


def _tool_use(call: Wire) -> dict[str, Any]:
    function = call["function"]
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": function["name"],
        "input": json.loads(function["arguments"]),
    }


def message_events(answer: Wire) -> bytes:
    """Encode an answer as the server-sent events of a stream, each block in one part."""
    usage = answer["usage"]
    begun = {**answer, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for number, block in enumerate(answer["content"]):
        events += [{**each, "index": number} for each in _block_events(block)]
    ended = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    events.append({"type": "message_delta", "delta": ended, "usage": usage})
    return write_events([*events, {"type": "message_stop"}], named=True)


def _block_events(block: Wire) -> Sequence[dict[str, Any]]:
    if block["type"] == "text":
        empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
    else:
        empty = {**block, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    return (
        {"type": "content_block_start", "content_block": empty},
        {"type": "content_block_delta", "delta": delta},
        {"type": "content_block_stop"},
    )
