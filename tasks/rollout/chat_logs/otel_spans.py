"""Conversations in spans of OpenTelemetry with the attributes of its conventions for generative AI.

Read from files of the collector's file exporter, OTLP as JSON: one `{"resourceSpans": [...]}` a line. Convention:
opentelemetry.io/docs/specs/semconv/gen-ai, the attributes gen_ai.input.messages, gen_ai.output.messages,
gen_ai.system_instructions and gen_ai.tool.definitions.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollmill.tasks.errors import EpisodeError

OUTPUT = "gen_ai.output.messages"


def list_spans(line: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the spans of an OTLP line."""
    for resource in line["resourceSpans"]:
        for scope in resource.get("scopeSpans", ()):
            yield from scope.get("spans", ())


def list_answers(span: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what a span says of each of a model's answers, in the form of `parse_conversation`.

    A span without recorded messages yields nothing: an application records them only on request.

    Raises:
        EpisodeError: the messages have another form.
    """
    attributes = {each["key"]: _value(each["value"]) for each in span.get("attributes", ())}
    if OUTPUT in attributes:
        yield from _conversations(span, attributes)


def _value(value: Mapping[str, Any]) -> Any:
    """Return a value of OTLP's JSON, such as {"stringValue": "gpt"} or {"arrayValue": {"values": [...]}}, as plain JSON."""
    ((kind, content),) = value.items()
    match kind:
        case "arrayValue":
            return [_value(each) for each in content.get("values", ())]
        case "kvlistValue":
            return {each["key"]: _value(each["value"]) for each in content.get("values", ())}
        case "intValue":
            return int(content)
    return content


def _conversations(span: Mapping[str, Any], attributes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    system = [{"role": "system", "parts": _list(attributes, "gen_ai.system_instructions")}]
    before = [
        message
        for each in [*(system if system[0]["parts"] else ()), *_list(attributes, "gen_ai.input.messages")]
        for message in _messages(each)
    ]
    begin, end = int(span.get("startTimeUnixNano", 0)), int(span.get("endTimeUnixNano", 0))
    answers = _list(attributes, OUTPUT)
    for number, answer in enumerate(answers):
        name = str(span.get("spanId", ""))
        yield {
            "id": f"{span.get('traceId', '')}/{name}" + (f"/{number}" if len(answers) > 1 else ""),
            "messages": [*before, *_messages(answer)],
            "tools": [_tool(each) for each in _list(attributes, "gen_ai.tool.definitions")],
            "model": attributes.get("gen_ai.response.model") or attributes.get("gen_ai.request.model"),
            "finish_reason": str(answer.get("finish_reason") or "stop"),
            "started_at": begin / 1e9 if begin else None,
            "duration_s": max(0, end - begin) / 1e9,
        }


def _list(attributes: Mapping[str, Any], name: str) -> Sequence[dict[str, Any]]:
    """Return an attribute that is a list of objects, structured or as JSON text; empty if it is missing."""
    value = attributes.get(name) or []
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise EpisodeError(f"its {name} is no JSON: {error}") from error
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise EpisodeError(f"its {name} is no list of objects")
    return value


def _messages(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert a message with parts to OpenAI's form; each answer of a tool becomes a message."""
    text: list[str] = []
    calls: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    for part in message.get("parts", ()):
        match part.get("type"):
            case "text":
                text.append(str(part.get("content", "")))
            case "reasoning":
                text.append(f"<think>\n{part.get('content', '')}\n</think>\n\n")
            case "tool_call":
                arguments = part.get("arguments", {})
                arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
                function = {"name": str(part.get("name", "")), "arguments": arguments}
                calls.append({"id": str(part.get("id") or ""), "type": "function", "function": function})
            case "tool_call_response":
                said = part.get("response", part.get("result", ""))
                content = said if isinstance(said, str) else json.dumps(said)
                answers.append(
                    {"role": "tool", "content": content, "tool_call_id": str(part.get("id") or "")}
                )
            case other:
                raise EpisodeError(f"a message has a part of type {other}; only text can be trained on")
    if answers:
        return [*answers, *([{"role": "user", "content": "".join(text)}] if text else [])]
    converted: dict[str, Any] = {"role": str(message.get("role")), "content": "".join(text)}
    return [converted | ({"tool_calls": calls} if calls else {})]


def _tool(definition: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's definition as OpenAI's chat request has it."""
    if "function" in definition:
        return dict(definition)
    function = {
        name: definition[name] for name in ("name", "description", "parameters") if name in definition
    }
    return {"type": "function", "function": function}
