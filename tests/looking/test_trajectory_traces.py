"""Trajectories as traces of OpenTelemetry: what a viewer of conversations shows, and what `rollmill import` reads again."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from otlp_receiver import Receiver

import rollmill as product
from rollmill.tasks.look.export.trajectory_traces import convert_message
from rollmill.tasks.rollout.chat_logs.otel_spans import list_answers, list_spans
from rollmill.tasks.store.folders import RunFolder

Command = Callable[..., str]


def attributes_of(span: Any) -> dict[str, Any]:
    """Attributes of a span or an event, with plain values."""
    found = {each.key: each.value for each in span.attributes}
    return {
        key: [item.string_value for item in value.array_value.values]
        if value.HasField("array_value")
        else getattr(value, str(value.WhichOneof("value")))
        for key, value in found.items()
    }


@pytest.fixture
def sent(rollmill: Command, small_run: RunFolder, receiver: Receiver) -> dict[str, Span]:
    """The trajectories of step 1 at a receiver, by their ids."""
    said = rollmill("spans", "small", "--step", "1", "--otlp", receiver.url, "--trajectories")
    assert said == f"16 trajectories sent to {receiver.url}\n"
    return {attributes_of(each)["gen_ai.response.id"]: each for each in receiver.spans}


def test_a_trajectory_is_a_span_with_its_conversation_tokens_and_reward(
    sent: dict[str, Span], small_run: RunFolder
) -> None:
    rows = product.open_run(small_run.location).trajectories.collect()
    rows = rows.filter(step=1)
    assert sent.keys() == set(rows["trajectory_id"])
    assert len({each.trace_id for each in sent.values()}) == len(sent)
    for row in rows.iter_rows(named=True):
        span, attributes = sent[row["trajectory_id"]], attributes_of(sent[row["trajectory_id"]])
        several = row["turns"] > 1
        assert attributes["gen_ai.operation.name"] == ("invoke_agent" if several else "chat")
        assert attributes["gen_ai.usage.output_tokens"] == row["n_completion_tokens"]
        assert attributes["rollmill.group"] == row["group"]
        assert f"http://{attributes['server.address']}:{attributes['server.port']}" == row["server"]
        seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert math.isclose(seconds, row["duration_s"], abs_tol=1e-6)
        assert span.start_time_unix_nano / 1e9 == row["started_at"].timestamp()
        given = json.loads(attributes["gen_ai.input.messages"])
        answer = json.loads(attributes.get("gen_ai.output.messages", "[]"))
        shown = [
            (each["role"], part.get("content") or part.get("response"))
            for each in [*given, *answer]
            for part in each["parts"]
        ]
        messages = [(each["role"], each["content"]) for each in json.loads(row["messages"])]
        assert shown == messages
        assert len(answer) == bool(row["turns"])
        scores = [attributes_of(each)["gen_ai.evaluation.score.value"] for each in span.events]
        assert scores == ([] if row["reward"] is None else [row["reward"]])
        if scores:
            (event,) = span.events
            assert event.name == "gen_ai.evaluation.result"
            assert attributes_of(event)["gen_ai.evaluation.name"] == "addition@1"


def test_a_failed_trajectory_is_an_error_and_one_without_a_policy_version_names_none(
    sent: dict[str, Span],
) -> None:
    (failed,) = (each for each in sent.values() if each.status.code == Status.STATUS_CODE_ERROR)
    attributes = attributes_of(failed)
    assert failed.status.message == "503 from the server"
    assert attributes["error.type"] == "RequestError"
    assert attributes["gen_ai.request.model"] == "small"
    assert "gen_ai.output.messages" not in attributes
    others = {attributes_of(each)["gen_ai.request.model"] for each in sent.values() if each is not failed}
    assert others == {"small@1"}


def test_import_reads_the_conversations_again(
    sent: dict[str, Span], receiver: Receiver, small_run: RunFolder
) -> None:
    rows = product.open_run(small_run.location).trajectories.filter(step=1).collect()
    expected = {
        json.dumps([[each["role"], each["content"]] for each in json.loads(row["messages"])])
        for row in rows.filter(rows["turns"] > 0).iter_rows(named=True)
    }
    found = {
        json.dumps([[each["role"], each["content"]] for each in conversation["messages"]])
        for request in receiver.taken
        for span in list_spans(MessageToDict(request))
        for conversation in list_answers(span)
    }
    assert found == expected


def test_the_calls_of_tools_and_their_answers_are_parts() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert convert_message({"role": "assistant", "content": None, "tool_calls": [call]}) == {
        "role": "assistant",
        "parts": [{"type": "tool_call", "id": "a", "name": "add", "arguments": '{"a": 1}'}],
    }
    assert convert_message({"role": "tool", "content": "1", "tool_call_id": "a"}) == {
        "role": "tool",
        "parts": [{"type": "tool_call_response", "id": "a", "response": "1"}],
    }


def test_the_last_step_is_sent_by_default_with_the_same_ids_each_time(
    rollmill: Command, small_run: RunFolder, receiver: Receiver
) -> None:
    for _ in range(2):
        rollmill("spans", "small", "--otlp", receiver.url, "--trajectories")
    first, second = (request for _, request in receiver.requests)
    assert first == second
    assert {attributes_of(each)["rollmill.step"] for each in receiver.spans} == {2}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--trajectories",), "give the receiver with --otlp URL"),
        (("--trajectories", "--otlp", "URL", "--step", "9"), "it has steps 0 to 2"),
    ],
)
def test_wrong_arguments_are_refused(
    rollmill: Command, receiver: Receiver, words: tuple[str, ...], said: str
) -> None:
    given = (receiver.url if each == "URL" else each for each in words)
    assert said in rollmill("spans", "small", *given)
    assert receiver.requests == []
