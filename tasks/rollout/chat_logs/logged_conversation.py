"""A conversation that another system logged, and which of several to keep."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from rollmill.tasks.errors import EpisodeError
from rollmill.tasks.rollout.environment import Message
from rollmill.tasks.rollout.environments.endpoint.chat_wire import check_request, message_from_wire

# Fields of a line that describe the conversation; all others are the example's.
KNOWN = frozenset({"messages", "tools", "id", "model", "finish_reason", "started_at", "duration_s"})


class _Line(msgspec.Struct):
    id: str | int | None = None
    model: str | None = None
    finish_reason: str | None = None
    started_at: datetime | float | None = None
    duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoggedConversation:
    """A conversation of another system's log, which ends with a message of the policy.

    Attributes:
        tools: JSON schemas of what the policy could call.
        log_id: id in the log; empty: the log gives none.
        example: what a scorer may read: the fields of the line that do not describe the conversation.
        model: name of the model that the log gives; empty: none.
        finish_reason: why the last message ended, as OpenAI's API says it.
        started_at: when the last message was requested; None: not known.
        duration_s: seconds until it was there; 0: not known.
        source: file and line, or span.
        repeat: number of equal conversations before it in its file, if the log gives no id: a policy may answer the same again.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    log_id: str = ""
    example: Mapping[str, object] = field(default_factory=dict)
    model: str = ""
    finish_reason: str = "stop"
    started_at: datetime | None = None
    duration_s: float = 0.0
    source: str = ""
    repeat: int = 0

    @property
    def digest(self) -> str:
        """SHA-256 of its id in the log, its example and what was said; without an id, of `started_at` and `repeat` too.

        Two with the same digest are one conversation.
        """
        digest = hashlib.sha256(
            _as_bytes([self.log_id, self.example, [_what_was_said(each) for each in self.messages]])
        ).hexdigest()
        return digest if self.log_id else distinguish_digest(digest, self.started_at, self.repeat)

    @property
    def prompt_digest(self) -> str:
        """SHA-256 of tools and what was said before the policy's first message; answers to the same prompt have the same."""
        n = next(at for at, each in enumerate(self.messages) if each.role == "assistant")
        return hashlib.sha256(
            _as_bytes([self.tools, [_what_was_said(each) for each in self.messages[:n]]])
        ).hexdigest()

    def turn_digests(self) -> list[str]:
        """Return the SHA-256 of what was said up to each message of the policy; the last is that of the whole conversation."""
        said, found = hashlib.sha256(), list[str]()
        for each in self.messages:
            said.update(_as_bytes(_what_was_said(each)))
            if each.role == "assistant":
                found.append(said.copy().hexdigest())
        return found


def distinguish_digest(digest: str, started_at: datetime | None, repeat: int = 0) -> str:
    """Return the digest of the `repeat`-th conversation of this time among those with the same digest of what was said."""
    if started_at is None and not repeat:
        return digest
    return hashlib.sha256(_as_bytes([digest, started_at and started_at.timestamp(), repeat])).hexdigest()


def _what_was_said(message: Message) -> list[object]:
    """Return role, text and calls of a message without the ids of calls, which a client may write otherwise."""
    calls = [(each["function"]["name"], each["function"]["arguments"]) for each in message.tool_calls]
    return [message.role, message.content, calls]


def _as_bytes(part: object) -> bytes:
    return json.dumps(part, sort_keys=True).encode()


def parse_conversation(line: Mapping[str, Any], source: str) -> LoggedConversation | None:
    """Read a conversation in the form of OpenAI's chat messages; returns None if the policy says nothing in it.

    Messages after the policy's last one are left out: nothing answers them. Reasoning in a separate field is written as the
    text `<think>...</think>` before what was said.

    Args:
        line: `messages`, and where known `tools`, `id`, `model`, `finish_reason`, `started_at` (ISO 8601, or seconds since
            1970) and `duration_s`. All other fields are what a scorer may read.
        source: where the line is.

    Raises:
        EpisodeError: a field is missing or has another type, or the conversation cannot be trained on.
    """
    if not isinstance(line.get("messages"), list):
        raise EpisodeError("it has no list `messages`")
    wires = [_normalize(each) if isinstance(each, Mapping) else each for each in line["messages"]]
    named = check_request({"messages": wires, "tools": line.get("tools") or []})
    messages = [message_from_wire(each) for each in named["messages"]]
    while messages and messages[-1].role != "assistant":
        messages.pop()
    if not messages:
        return None
    if messages[0].role == "assistant":
        raise EpisodeError("its first message is the policy's; one needs a prompt")
    example = {name: value for name, value in line.items() if name not in KNOWN}
    try:
        given = msgspec.convert({name: line.get(name) for name in _Line.__struct_fields__}, _Line)
        started_at = _as_time(given.started_at)
        _as_bytes(example)
        # What cannot be written in UTF-8, such as half of an emoji, can be neither tokenized nor stored.
        said = [(each.name, *_what_was_said(each)) for each in messages]
        written = [said, named["tools"], given.model, given.finish_reason]
        json.dumps(written, ensure_ascii=False).encode()
    except (ValueError, TypeError, OverflowError, OSError, RecursionError) as error:
        raise EpisodeError(f"{type(error).__name__}: {error}") from error
    return LoggedConversation(
        tuple(messages),
        tuple(named["tools"]),
        log_id="" if given.id is None else str(given.id),
        example=example,
        model=given.model or "",
        finish_reason=given.finish_reason or "stop",
        started_at=started_at,
        duration_s=given.duration_s or 0.0,
        source=source,
    )


def _normalize(wire: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its reasoning in its text, and with calls whose ids and arguments are texts, as OpenAI has them."""
    normal = dict(wire)
    reasoning = normal.pop("reasoning_content", None) or normal.pop("reasoning", None)
    if isinstance(reasoning, str):
        thought, content = f"<think>\n{reasoning}\n</think>\n\n", wire.get("content") or ""
        if isinstance(content, str):
            normal["content"] = thought + content
        elif isinstance(content, list):
            normal["content"] = [{"type": "text", "text": thought}, *content]
    if not isinstance(wire.get("tool_calls"), list):
        return normal
    calls = []
    for call in wire["tool_calls"]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            arguments = function.get("arguments") or "{}"
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            call = {**call, "id": call.get("id") or "", "function": {**function, "arguments": text}}
        calls.append(call)
    return normal | {"tool_calls": calls}


def _as_time(given: datetime | float | None) -> datetime | None:
    if given is None or isinstance(given, datetime):
        return given.replace(tzinfo=UTC) if given and given.tzinfo is None else given
    return datetime.fromtimestamp(given, UTC)


@dataclass(frozen=True, slots=True)
class Kept:
    """The conversations of a log that are to be imported, and how many are not.

    Attributes:
        conversations: in the order of the log.
        left_out: number of the others, by reason.
    """

    conversations: tuple[LoggedConversation, ...]
    left_out: Counter[str]


def drop_duplicates(conversations: Sequence[LoggedConversation], stored: frozenset[str]) -> Kept:
    """Keep each conversation once: not those that are stored, and for each that another continues, not that other's beginning.

    A server's log has a line for each request, and each request of a conversation repeats what was said before. Of four answers with
    the same text to a prompt, one of which was continued, three are kept.

    Args:
        conversations: of a log.
        stored: digests of conversations that are imported already.
    """
    turns = [each.turn_digests() for each in conversations]
    left_out: Counter[str] = Counter()
    continued: Counter[str] = Counter()
    seen: set[str] = set()
    kept: list[int] = []
    # The longest first: what it begins with is known when its beginnings come.
    for at in sorted(range(len(turns)), key=lambda at: -len(turns[at])):
        digest = conversations[at].digest
        if digest in seen:
            left_out["occur twice"] += 1
            continue
        seen.add(digest)
        if continued[turns[at][-1]]:
            continued[turns[at][-1]] -= 1
            left_out["are the beginning of another"] += 1
            continue
        continued.update(turns[at][:-1])
        if digest in stored:
            left_out["are imported already"] += 1
        else:
            kept.append(at)
    return Kept(tuple(conversations[at] for at in sorted(kept)), left_out)
