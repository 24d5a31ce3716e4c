"""OpenAI's chat messages, as environments of the `verifiers` library send them, and ours: pure functions both ways."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tasks.errors import EpisodeError
from tasks.rollout.environment import Message
from tasks.rollout.tools import tool_calls

Wire = Mapping[str, Any]
"""A message, request or completion as JSON of OpenAI's chat completions."""

ROLES: Mapping[str, Literal["system", "user", "assistant", "tool"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
HARMLESS = frozenset({"model", "messages", "tools", "stream", "stream_options", "user", "metadata", "store"})
AS_IF_ABSENT: Mapping[str, object] = {"n": 1, "tool_choice": "auto", "parallel_tool_calls": True}
END_OF_REASONING = "</think>"
TOOL_CALL = re.compile(r"<tool_call>.*?</tool_call>", re.DOTALL)


def message_of(wire: Wire) -> Message:
    """A message for our conversation.

    Example: {"role": "tool", "content": "935", "tool_call_id": "call_0_0"} is
    Message("tool", "935", tool_call_id="call_0_0").

    Raises:
        EpisodeError: it has parts that are no text, or a role that chat templates do not know.
    """
    role = ROLES.get(str(wire.get("role")))
    if role is None:
        raise EpisodeError(f"the environment sent a message of role {wire.get('role')!r}")
    return Message(
        role,
        text_of(wire),
        name=str(wire.get("name") or ""),
        tool_call_id=str(wire.get("tool_call_id") or ""),
        tool_calls=tuple(wire.get("tool_calls") or ()),
    )


def text_of(wire: Wire) -> str:
    """The text of a message, of all its parts when it has several."""
    content = wire.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, Mapping) else {} for part in content]
    other = [str(part.get("type")) for part in parts if part.get("type") != "text"]
    if other:
        raise EpisodeError(f"the environment sent a part of type {other[0]}; only text can be sampled from")
    return "".join(str(part["text"]) for part in parts)


def new_messages(before: Sequence[Wire], now: Sequence[Wire]) -> Sequence[Wire]:
    """What a request adds to the conversation that was `before`, the policy's own message last there.

    Example: new_messages([user, assistant], [user, assistant, tool]) is [tool].

    Raises:
        EpisodeError: the request does not begin with the conversation before it.
    """
    for i, (old, new) in enumerate(zip(before, now, strict=False)):
        if _essence(old) != _essence(new):
            raise EpisodeError(
                f"the environment rewrote message {i} of the conversation ({old['role']}: {_short(old)} became "
                f"{new.get('role')}: {_short(new)}); its turns cannot be joined by token ids"
            )
    if len(now) < len(before):
        raise EpisodeError(
            f"the environment dropped messages: its request has {len(now)}, the conversation {len(before)}; "
            "its turns cannot be joined by token ids"
        )
    return now[len(before) :]


def _essence(wire: Wire) -> tuple[object, ...]:
    calls = [each["function"] for each in wire.get("tool_calls") or ()]
    called = [(each["name"], each["arguments"]) for each in calls]
    return ROLES.get(str(wire.get("role"))), text_of(wire), called


def _short(wire: Wire, length: int = 60) -> str:
    text = text_of(wire)
    return repr(text if len(text) <= length else f"{text[:length]}...")


def refuse_settings(request: Wire) -> None:
    """Refuse a request with settings of sampling: how the policy is sampled is the run's alone.

    Raises:
        EpisodeError: names the setting and its value.
    """
    for name, value in request.items():
        if name in HARMLESS or value is None or AS_IF_ABSENT.get(name, object()) == value:
            continue
        raise EpisodeError(
            f"the environment asks for {name} = {value!r}; the policy is sampled as `rollout` and `serve` say: take it "
            "out of the environment's settings (rollout.environment_args)"
        )


def assistant_of(text: str, turn: int) -> dict[str, Any]:
    """The policy's message in its `turn`-th turn, as servers with parsers of reasoning and of tool calls give it.

    What is before `</think>` is its reasoning; what stands in `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
    are its calls. A call that is no such JSON stays text, for the environment to answer as it likes.

    Example: 'let me see <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' has content "let me see" and one
    call of add with arguments '{"a": 1}'.
    """
    reasoning, thinks, said = text.rpartition(END_OF_REASONING)
    calls: list[dict[str, Any]] = []

    def taken(block: re.Match[str]) -> str:
        called = tool_calls(block[0])
        for call in called:
            function = {"name": call.name, "arguments": json.dumps(call.arguments)}
            calls.append({"id": f"call_{turn}_{len(calls)}", "type": "function", "function": function})
        return "" if called else block[0]

    content = TOOL_CALL.sub(taken, said)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thinks:
        message |= {
            "reasoning_content": reasoning.strip().removeprefix("<think>").strip(),
            "content": content.strip(),
        }
    if calls:
        message |= {"content": content.strip() or None, "tool_calls": calls}
    return message


def completion_of(message: Wire, request_id: str) -> dict[str, Any]:
    """A chat completion with one choice; its token counts are 0, since the environment's tokens are not the policy's."""
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return {
        "id": request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "policy",
        "choices": [{"index": 0, "message": dict(message), "finish_reason": reason}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


def events_of(completion: Wire) -> bytes:
    """A completion as the server-sent events of a stream: the whole message in one, then its end."""
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
