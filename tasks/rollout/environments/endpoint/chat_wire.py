"""Convert between the messages of OpenAI's chat completions and ours; pure functions."""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from rollmill.tasks.errors import EpisodeError
from rollmill.tasks.rollout.environment import Message, TokenCounts
from rollmill.tasks.rollout.tools import find_calls

MODEL = "policy"
"""Name of the model in answers; a request may name any."""

Wire = Mapping[str, Any]
"""A message, request or completion as JSON of OpenAI's chat completions."""


class Said(NamedTuple):
    """A message of the policy, as OpenAI's chat message, and its token counts."""

    message: Wire
    counts: TokenCounts


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
# Settings of programs that are written for other models: what they change is left to the run.
LEFT_TO_THE_RUN = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "parallel_tool_calls"),
        *("reasoning", "reasoning_effort", "thinking", "verbosity", "include", "truncation", "service_tier"),
        *("prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    }
)
# Values that ask for text.
PLAIN: Mapping[str, object] = {"response_format": {"type": "text"}, "modalities": ["text"]}
END_OF_REASONING = "</think>"


def message_from_wire(wire: Wire) -> Message:
    """Convert a message of OpenAI's chat completions to a Message; the arguments of its calls are objects.

    Example: {"role": "tool", "content": "935", "tool_call_id": "call_0_0"} is
    Message("tool", "935", tool_call_id="call_0_0").

    Raises:
        EpisodeError: it has parts other than text, or a role that chat templates lack.
    """
    role = ROLES.get(str(wire.get("role")))
    if role is None:
        raise EpisodeError(f"a request has a message of role {wire.get('role')!r}, which chat templates lack")
    return Message(
        role,
        text_from_wire(wire),
        name=str(wire.get("name") or ""),
        tool_call_id=str(wire.get("tool_call_id") or ""),
        tool_calls=tuple(map(_call_from_wire, wire.get("tool_calls") or ())),
    )


def _call_from_wire(call: Wire) -> dict[str, Any]:
    """Return a call whose arguments, JSON text in OpenAI's form, are an object, as chat templates expect; other text stays."""
    arguments = _read_arguments(call)
    if not isinstance(arguments, Mapping):
        arguments = call["function"].get("arguments", "")
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _read_arguments(call: Wire) -> object:
    """Return the arguments of a call as values, since programs write the same JSON in several ways; what is no JSON stays text."""
    text = call["function"].get("arguments", "")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


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
        raise EpisodeError(f"a request has a part of type {other[0]}; only text can be sampled from")
    return "".join(str(part.get("text", "")) for part in parts)


class _Part(msgspec.Struct):
    type: str
    text: str = ""


class _Function(msgspec.Struct):
    name: str
    arguments: str = ""


class _Call(msgspec.Struct):
    function: _Function
    id: str = ""


class _ChatMessage(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_Call] | None = None


class _Tool(msgspec.Struct):
    function: _Function


class _ChatRequest(msgspec.Struct):
    messages: Annotated[list[_ChatMessage], msgspec.Meta(min_length=1)]
    tools: list[_Tool] | None = None


def check_form(request: object, form: type[msgspec.Struct]) -> None:
    """Refuse a request whose fields have other types than those of `form`; fields that it lacks are not looked at.

    Raises:
        EpisodeError: names the first wrong field.
    """
    try:
        msgspec.convert(request, form)
    except msgspec.ValidationError as error:
        raise EpisodeError(f"a request is wrong: {error}") from error


def check_request(request: Wire) -> Wire:
    """Return a chat request whose messages and tools have the form of OpenAI's; each answer of a tool gets the tool's name.

    Raises:
        EpisodeError: they have another form.
    """
    check_form(request, _ChatRequest)
    messages = request["messages"]
    calls = [call for each in messages for call in each.get("tool_calls") or ()]
    names = {call["id"]: call["function"]["name"] for call in calls if call.get("id")}
    named = [
        {"name": names[each["tool_call_id"]], **each}
        if each["role"] == "tool" and each.get("tool_call_id") in names
        else each
        for each in messages
    ]
    return {**request, "messages": named}


def leave_sampling_to_the_run(request: Wire) -> dict[str, Any]:
    """Return a request without the settings that the run decides, and without those that ask for nothing.

    Example: {"messages": [...], "temperature": 0.2, "logprobs": False, "n": 2} becomes {"messages": [...], "n": 2}.
    """
    return {
        name: value
        for name, value in request.items()
        if value and name not in LEFT_TO_THE_RUN and PLAIN.get(name) != value
    }


def new_id(prefix: str) -> str:
    """Return a new id, such as msg_0f3c."""
    return f"{prefix}_{uuid.uuid4().hex}"


def write_events(events: Sequence[Wire], *, named: bool) -> bytes:
    """Encode server-sent events; `named` writes the type of each as its name too."""
    lines = [
        (b"event: " + str(each["type"]).encode() + b"\n" if named else b"")
        + b"data: "
        + json.dumps(each).encode()
        for each in events
    ]
    return b"".join(line + b"\n\n" for line in lines)


def continues(before: Sequence[Wire], now: Sequence[Wire]) -> bool:
    """Return True if a request begins with all messages of the conversation `before`.

    Example: continues([user, assistant], [user, assistant, tool]) is True, and continues([user, assistant], [other, tool]) is False.
    """
    return len(before) <= len(now) and all(map(is_same_message, before, now))


def is_same_message(one: Wire, other: Wire) -> bool:
    """Return True if two messages have the same role, text and calls; the ids of calls, and how their arguments are written, may differ."""
    return _comparable_parts(one) == _comparable_parts(other)


def _comparable_parts(wire: Wire) -> tuple[object, ...]:
    called = [(each["function"]["name"], _read_arguments(each)) for each in wire.get("tool_calls") or ()]
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
            f"a request has {name} = {value!r:.200}; only `rollout` and `serve` set how the policy is sampled: remove it from "
            "the program, or for a verifiers environment from rollout.environment.args"
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
    content, rest = "", 0
    for begin, end, call in find_calls(said):
        if call is not None:
            function = {"name": call.name, "arguments": json.dumps(call.arguments)}
            calls.append({"id": f"call_{turn}_{len(calls)}", "type": "function", "function": function})
            content, rest = content + said[rest:begin], end
    content += said[rest:]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thinks:
        message |= {
            "reasoning_content": reasoning.strip().removeprefix("<think>").strip(),
            "content": content.strip(),
        }
    if calls:
        message |= {"content": content.strip() or None, "tool_calls": calls}
    return message


def chat_completion(said: Said, request_id: str) -> dict[str, Any]:
    """Return an OpenAI chat completion whose one choice is the policy's message."""
    message, (n_prompt, n_completion) = said
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return {
        "id": request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "message": dict(message), "finish_reason": reason}],
        "usage": {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_completion,
            "total_tokens": n_prompt + n_completion,
        },
    }


def has_usage(body: Wire) -> bool:
    """Return True if a request asks for a last event with the token counts, which has no choice; other clients read choices[0]."""
    options = body.get("stream_options")
    return isinstance(options, Mapping) and bool(options.get("include_usage"))


def completion_events(completion: Wire, *, with_usage: bool) -> bytes:
    """Encode a chat completion as server-sent events: the message in one event, then finish reason, then usage if asked for."""
    choice = completion["choices"][0]
    calls = [{"index": i, **call} for i, call in enumerate(choice["message"].get("tool_calls") or ())]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    shared = {**completion, "object": "chat.completion.chunk", "usage": None}
    chunks = [
        {**shared, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**shared, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]
    if with_usage:
        chunks.append({**shared, "choices": [], "usage": completion["usage"]})
    return write_events(chunks, named=False) + b"data: [DONE]\n\n"
