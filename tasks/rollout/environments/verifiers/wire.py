"""Convert between OpenAI's chat messages, which environments of the `verifiers` library send, and ours; pure functions."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rollmill.tasks.errors import EpisodeError
from rollmill.tasks.rollout.environment import Message
from rollmill.tasks.rollout.tools import tool_calls

Wire = Mapping[str, Any]
"""A message, request or completion as JSON of OpenAI's chat completions."""

ROLES: Mapping[str, Literal["system", "user", "assistant", "tool"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# Fields of a request that do not change how the policy is sampled.
HARMLESS = frozenset({"model", "messages", "tools", "stream", "stream_options", "user", "metadata", "store"})
# Values that ask for what a server does anyway.
AS_IF_ABSENT: Mapping[str, object] = {"n": 1, "tool_choice": "auto", "parallel_tool_calls": True}
END_OF_REASONING = "</think>"
TOOL_CALL = re.compile(r"<tool_call>.*?</tool_call>", re.DOTALL)


def message_from_wire(wire: Wire) -> Message:
    """Convert a message of OpenAI's chat completions to a Message.

    Example: {"role": "tool", "content": "935", "tool_call_id": "call_0_0"} is
    Message("tool", "935", tool_call_id="call_0_0").

    Raises:
        EpisodeError: it has parts other than text, or a role that chat templates lack.
    """
    role = ROLES.get(str(wire.get("role")))
    if role is None:
        raise EpisodeError(f"the environment sent a message of role {wire.get('role')!r}")
    return Message(
        role,
        text_from_wire(wire),
        name=str(wire.get("name") or ""),
        tool_call_id=str(wire.get("tool_call_id") or ""),
        tool_calls=tuple(wire.get("tool_calls") or ()),
    )


def text_from_wire(wire: Wire) -> str:
    """Return the text of an OpenAI chat message, with all its parts joined.

    Raises:
        EpisodeError: a part is not text.
    """
    content = wire.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, Mapping) else {} for part in content]
    other = [str(part.get("type")) for part in parts if part.get("type") != "text"]
    if other:
        raise EpisodeError(f"the environment sent a part of type {other[0]}; only text can be sampled from")
    return "".join(str(part["text"]) for part in parts)


def continues(before: Sequence[Wire], now: Sequence[Wire]) -> bool:
    """Return True if a request begins with all messages of the conversation `before`.

    Example: continues([user, assistant], [user, assistant, tool]) is True, and continues([user, assistant], [other, tool]) is False.
    """
    return len(before) <= len(now) and all(map(is_same_message, before, now))


def is_same_message(one: Wire, other: Wire) -> bool:
    """Return True if two messages have the same role, text and calls; the ids of calls may differ."""
    return _comparable_parts(one) == _comparable_parts(other)


def _comparable_parts(wire: Wire) -> tuple[object, ...]:
    calls = [each["function"] for each in wire.get("tool_calls") or ()]
    called = [(each["name"], each["arguments"]) for each in calls]
    return ROLES.get(str(wire.get("role"))), text_from_wire(wire), called


def refuse_sampling_settings(request: Wire) -> None:
    """Refuse a request with sampling settings, because only the run sets how the policy is sampled.

    Raises:
        EpisodeError: names the setting and its value.
    """
    for name, value in request.items():
        if name in HARMLESS or value is None or AS_IF_ABSENT.get(name, object()) == value:
            continue
        raise EpisodeError(
            f"the environment asks for {name} = {value!r}; only `rollout` and `serve` set how the policy is "
            "sampled: remove it from the environment's settings (rollout.environment_args)"
        )


def assistant_message(text: str, turn: int) -> dict[str, Any]:
    """Return the policy's text as an OpenAI assistant message, with reasoning and tool calls in separate fields.

    Text before `</think>` is the reasoning; each `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` is a call,
    whose id has the number `turn`. A block without valid JSON stays in the text.

    Example: 'let me see <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' has content "let me see" and one
    call of add with arguments '{"a": 1}'.
    """
    reasoning, thinks, said = text.rpartition(END_OF_REASONING)
    calls: list[dict[str, Any]] = []

    def extract_calls(block: re.Match[str]) -> str:
        called = tool_calls(block[0])
        for call in called:
            function = {"name": call.name, "arguments": json.dumps(call.arguments)}
            calls.append({"id": f"call_{turn}_{len(calls)}", "type": "function", "function": function})
        return "" if called else block[0]

    content = TOOL_CALL.sub(extract_calls, said)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thinks:
        message |= {
            "reasoning_content": reasoning.strip().removeprefix("<think>").strip(),
            "content": content.strip(),
        }
    if calls:
        message |= {"content": content.strip() or None, "tool_calls": calls}
    return message


def chat_completion(message: Wire, request_id: str) -> dict[str, Any]:
    """Return an OpenAI chat completion whose one choice is `message`; its token counts are 0."""
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return {
        "id": request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "policy",
        "choices": [{"index": 0, "message": dict(message), "finish_reason": reason}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


def completion_events(completion: Wire) -> bytes:
    """Encode a chat completion as server-sent events: the message in one event, then finish reason, then usage."""
    choice = completion["choices"][0]
    calls = [{"index": i, **call} for i, call in enumerate(choice["message"].get("tool_calls") or ())]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    shared = {**completion, "object": "chat.completion.chunk", "usage": None}
    chunks = (
        {**shared, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**shared, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        {**shared, "choices": [], "usage": completion["usage"]},
    )
    return (
        b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
    )
