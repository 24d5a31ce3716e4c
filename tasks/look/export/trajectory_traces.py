"""Send a run's trajectories to OpenTelemetry by its conventions for generative AI, which viewers of traces show as conversations.

Convention: github.com/open-telemetry/semantic-conventions-genai, the inference and agent spans. A trajectory is a trace of one
span, with the messages before its last completion as input and that completion as output; its reward is an evaluation event.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue

from rollmill.tasks.look.export.otlp_export import OTLP_TIMEOUT_S, send_spans
from rollmill.tasks.look.tables.joined_trajectories import scan_trajectories
from rollmill.tasks.look.tables.run_tables import check_rollouts
from rollmill.tasks.look.tables.scores import resolve_scorer
from rollmill.tasks.look.tables.selection import Interval, select_partitions
from rollmill.tasks.look.tables.view import count_noun
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_steps

NS_PER_S = 1_000_000_000
EVALUATION = "gen_ai.evaluation.result"
# Attributes by the column that has their value.
_ATTRIBUTES = {
    "gen_ai.request.temperature": "temperature",
    "gen_ai.request.seed": "sampling_seed",
    "gen_ai.response.id": "trajectory_id",
    "gen_ai.conversation.id": "trajectory_id",
    "gen_ai.usage.input_tokens": "n_prompt_tokens",
    "gen_ai.usage.output_tokens": "n_completion_tokens",
    "gen_ai.agent.name": "env",
    "rollmill.step": "step",
    "rollmill.group": "group",
    "rollmill.sample": "sample",
    "rollmill.example": "example_id",
    "rollmill.status": "status",
    "rollmill.advantage": "advantage",
}
_READ = (
    "server",
    "finish_reason",
    "turns",
    "turn_messages",
    "messages",
    "started_at",
    "duration_s",
    "reward",
)
_OF_FAILURES = ("error_type", "error", "attempt", "policy_version_last")


def send_trajectories(folder: RunFolder, asked: Interval | None, endpoint: str) -> str:
    """Send the trajectories of the steps `asked`, or of the last one, to a receiver; return a line with their number.

    One that is sent again has the same id.

    Raises:
        ConfigError: the run has no such step.
        RequestError: the receiver did not accept them.
    """
    check_rollouts(folder)
    steps = select_partitions(folder, "rollouts", "step", asked) or list_steps(folder, "rollouts")[-1:]
    scorer, n = resolve_scorer(folder) or "", 0
    columns = dict.fromkeys((*_ATTRIBUTES.values(), *_READ, *_OF_FAILURES))
    for step in steps:
        rows = (
            scan_trajectories(folder, "", {"step": step}).select(*columns).sort("group", "sample").collect()
        )
        spans = [_make_span(row, folder.name, scorer) for row in rows.iter_rows(named=True)]
        n += send_spans(endpoint, spans, OTLP_TIMEOUT_S)
    return f"{count_noun(n, 'trajectory', 'trajectories')} sent to {endpoint}"


def _make_span(row: Mapping[str, Any], run: str, scorer: str) -> ReadableSpan:
    """Convert a row of `trajectories` to a span."""
    is_chat, version = row["turns"] <= 1, row["policy_version_last"]
    operation = "chat" if is_chat else "invoke_agent"
    model = f"{run}@{version}" if version >= 0 else run
    given, answer = _split_messages(row)
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": model,
        "gen_ai.input.messages": json.dumps([convert_message(each) for each in given]),
        **{name: row[column] for name, column in _ATTRIBUTES.items() if row[column] not in (None, "")},
    }
    if answer:
        reason = row["finish_reason"] or "error"
        output = [convert_message(each) | {"finish_reason": reason} for each in answer]
        attributes |= {
            "gen_ai.output.messages": json.dumps(output),
            "gen_ai.response.finish_reasons": [reason],
        }
    if (server := urlsplit(row["server"])).hostname:
        attributes |= {"server.address": server.hostname, "server.port": server.port or 80}
    if row["error_type"]:
        attributes["error.type"] = row["error_type"]
    begun, reward = 1000 * int(row["started_at"].timestamp() * 1e6), row["reward"]
    ended = begun + int(row["duration_s"] * NS_PER_S)
    score = {"gen_ai.evaluation.name": scorer, "gen_ai.evaluation.score.value": reward}
    return ReadableSpan(
        f"{operation} {model if is_chat else row['env']}",
        context=_make_context(f"{row['trajectory_id']} {row['attempt']}"),
        kind=SpanKind.CLIENT if is_chat else SpanKind.INTERNAL,
        resource=Resource({"service.name": "rollmill", "run.name": run}),
        attributes=attributes,
        events=[Event(EVALUATION, score, timestamp=ended)] if reward is not None else [],
        status=Status(StatusCode.ERROR, row["error"]) if row["status"] == "failed" else Status(),
        start_time=begun,
        end_time=ended,
    )


def _split_messages(row: Mapping[str, Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the messages before the last completion, and a list with that completion; the latter is empty without one."""
    messages = json.loads(row["messages"])
    if not row["turns"]:
        return messages, []
    at = row["turn_messages"][-1]
    return messages[:at], messages[at : at + 1]


def convert_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message of OpenAI's form to the convention's, with parts."""
    return {"role": message["role"], "parts": [*_parts(message)]}


def _parts(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    text = message.get("content") or ""
    if message["role"] == "tool":
        yield {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": text}
        return
    if text:
        yield {"type": "text", "content": text}
    for call in message.get("tool_calls") or ():
        function = call["function"]
        yield {
            "type": "tool_call",
            "id": call.get("id"),
            "name": function["name"],
            "arguments": function["arguments"],
        }


def _make_context(name: str) -> SpanContext:
    """Return a trace of one span, with ids hashed from a name, so that they are the same each time."""
    digest = hashlib.blake2b(name.encode(), digest_size=24).digest()
    sampled = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(
        int.from_bytes(digest[:16]), int.from_bytes(digest[16:]), is_remote=False, trace_flags=sampled
    )
