"""A conversation that another system logged, and which of several to keep."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
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

    @property
    def digest(self) -> str:
        """SHA-256 of its id in the log and of what was said; two with the same digest are one conversation."""
        return _digest(self.log_id, *self._said(len(self.messages)))

    @property
    def prompt_digest(self) -> str:
        """SHA-256 of what was said before the policy's first message; two answers to the same prompt have the same."""
        n = next(at for at, each in enumerate(self.messages) if each.role == "assistant")
        return _digest(*self._said(n))

    def turn_digests(self) -> list[str]:
        """Return the SHA-256 of what was said up to each message of the policy; the last is that of the whole conversation."""
        ends = [at for at, each in enumerate(self.messages, 1) if each.role == "assistant"]
        return [_digest(*self._said(end)) for end in ends]

    def _said(self, n: int) -> list[object]:
        return [*self.tools, *(message.as_json() for message in self.messages[:n])]


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def parse_conversation(line: Mapping[str, Any], source: str) -> LoggedConversation | None:
    """Read a conversation in the form of OpenAI's chat messages; returns None if the policy says nothing in it.

    Messages after the policy's last one are left out: nothing answers them.

    Args:
        line: `messages`, and where known `tools`, `id`, `model`, `finish_reason`, `started_at` (ISO 8601, or seconds since
            1970) and `duration_s`. All other fields are what a scorer may read.
        source: where the line is.

    Raises:
        EpisodeError: a field is missing or has another type.
    """
    if not isinstance(line.get("messages"), list):
        raise EpisodeError("it has no list `messages`")
    named = check_request({"messages": line["messages"], "tools": line.get("tools") or []})
    messages = [message_from_wire(_parse_arguments(each)) for each in named["messages"]]
    while messages and messages[-1].role != "assistant":
        messages.pop()
    if not messages:
        return None
    if messages[0].role == "assistant":
        raise EpisodeError("its first message is the policy's; one needs a prompt")
    try:
        given = msgspec.convert({name: line.get(name) for name in _Line.__struct_fields__}, _Line)
    except msgspec.ValidationError as error:
        raise EpisodeError(str(error)) from error
    return LoggedConversation(
        tuple(messages),
        tuple(named["tools"]),
        log_id="" if given.id is None else str(given.id),
        example={name: value for name, value in line.items() if name not in KNOWN},
        model=given.model or "",
        finish_reason=given.finish_reason or "stop",
        started_at=_as_time(given.started_at),
        duration_s=given.duration_s or 0.0,
        source=source,
    )


def _parse_arguments(wire: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose calls have their arguments as objects, which chat templates expect, where they are JSON text."""
    calls = []
    for call in wire.get("tool_calls") or ():
        arguments = call["function"].get("arguments") or "{}"
        with suppress(ValueError):
            arguments = json.loads(arguments)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**wire, "tool_calls": calls} if calls else wire


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
    left_out: Mapping[str, int]


def drop_duplicates(conversations: Sequence[LoggedConversation], stored: frozenset[str]) -> Kept:
    """Keep each conversation once: not those that are stored, nor those that a longer one of the log begins with.

    A server's log has a line for each request, and each request of a conversation repeats what was said before.

    Args:
        conversations: of a log.
        stored: digests of conversations that are imported already.
    """
    begun = {digest for each in conversations for digest in each.turn_digests()[:-1]}
    kept: dict[str, LoggedConversation] = {}
    left_out: dict[str, int] = {}
    for each in conversations:
        reason = ""
        if each.turn_digests()[-1] in begun:
            reason = "are the beginning of another"
        elif each.digest in kept:
            reason = "occur twice"
        elif each.digest in stored:
            reason = "are imported already"
        if reason:
            left_out[reason] = left_out.get(reason, 0) + 1
        else:
            kept[each.digest] = each
    return Kept(tuple(kept.values()), left_out)
