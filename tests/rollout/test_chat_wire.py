"""OpenAI's chat messages and ours."""

import json

import pytest

from rollmill.tasks.errors import EpisodeError
from rollmill.tasks.rollout.environment import Message, TokenCounts
from rollmill.tasks.rollout.environments.endpoint.chat_wire import (
    Said,
    assistant_message,
    chat_completion,
    completion_events,
    continues,
    has_usage,
    is_same_message,
    message_from_wire,
    refuse_sampling_settings,
)

USER = {"role": "user", "content": "17*55?"}
CALL = '<tool_call>\n{"name": "times", "arguments": {"a": 17, "b": {"c": 55}}}\n</tool_call>'


def test_tool_calls_are_read_from_the_policys_text() -> None:
    said = assistant_message(f"let me see\n{CALL}\n{CALL}", 3)
    assert said["content"] == "let me see"
    assert [call["id"] for call in said["tool_calls"]] == ["call_3_0", "call_3_1"]
    function = said["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("times", {"a": 17, "b": {"c": 55}})


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        " 935\n",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": </tool_call>',
        '<tool_call>{"name": "x"}',
    ],
)
def test_text_that_is_no_tool_call_stays_unchanged(text: str) -> None:
    assert assistant_message(text, 0) == {"role": "assistant", "content": text}


def test_reasoning_is_not_part_of_the_policys_message() -> None:
    said = assistant_message("<think>17*50 is 850</think>\n\n935", 0)
    assert (said["reasoning_content"], said["content"]) == ("17*50 is 850", "935")


def test_the_echo_of_a_call_is_the_policys_message() -> None:
    said = assistant_message(CALL, 0)
    echoed = {**said, "content": "", "refusal": None}
    answer = {"role": "tool", "tool_call_id": "call_0_0", "content": "935"}
    assert continues([USER, said], [USER, echoed, answer])


@pytest.mark.parametrize("written", ['{"text":"é","n":1}', '{"n": 1, "text": "\\u00e9"}'])
def test_arguments_that_a_program_writes_in_another_way_are_the_same_call(written: str) -> None:
    said = assistant_message('<tool_call>{"name": "add", "arguments": {"text": "é", "n": 1}}</tool_call>', 0)
    echoed = {**said, "tool_calls": [{"id": "x", "function": {"name": "add", "arguments": written}}]}
    assert is_same_message(said, echoed)
    other = {**said, "tool_calls": [{"id": "x", "function": {"name": "add", "arguments": '{"n": 2}'}}]}
    assert not is_same_message(said, other)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ({"name": "add", "arguments": '{"n": 1}'}, {"n": 1}),
        ({"name": "add", "arguments": "1 and 2"}, "1 and 2"),
        ({"name": "add", "arguments": "5"}, "5"),
        ({"name": "add", "arguments": "[" * 100_000}, "[" * 100_000),
        ({"name": "add"}, ""),
    ],
)
def test_a_call_that_the_policy_did_not_sample_has_its_arguments_as_chat_templates_expect_them(
    function: dict, arguments: object
) -> None:
    message = message_from_wire({"role": "assistant", "tool_calls": [{"id": "a", "function": function}]})
    assert message.tool_calls == ({"id": "a", "function": {"name": "add", "arguments": arguments}},)


def test_parts_of_text_are_the_same_as_their_text() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "17*"}, {"type": "text", "text": "55?"}]}
    assert continues([USER], [parts, USER])
    assert message_from_wire(parts) == Message("user", "17*55?")


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ([USER, USER], [USER]),
        ([USER], [{"role": "user", "content": "18*55?"}]),
        ([assistant_message(CALL, 0)], [{"role": "assistant", "content": None}]),
    ],
)
def test_dropped_and_rewritten_messages_do_not_continue_a_conversation(
    before: list[dict], now: list[dict]
) -> None:
    assert not continues(before, now)


@pytest.mark.parametrize(
    "wire",
    [
        {"role": "function", "content": ""},
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
    ],
)
def test_a_message_that_no_text_can_represent_is_refused(wire: dict) -> None:
    with pytest.raises(EpisodeError, match=r"role 'function'|type image_url"):
        message_from_wire(wire)


@pytest.mark.parametrize("setting", [{"temperature": 0.2}, {"n": 2}, {"stop": ["\n"]}, {"max_tokens": 5}])
def test_settings_of_sampling_are_refused_by_name(setting: dict) -> None:
    with pytest.raises(EpisodeError, match=next(iter(setting))):
        refuse_sampling_settings({"model": "policy", "messages": [], **setting})


def test_settings_that_change_nothing_are_accepted() -> None:
    refuse_sampling_settings(
        {"model": "policy", "messages": [], "stream": True, "n": 1, "stop": None, "tool_choice": "auto"}
    )


def test_a_stream_equals_the_completion() -> None:
    completion = chat_completion(Said(assistant_message(CALL, 0), TokenCounts(7, 2)), "trace")
    lines = [line for line in completion_events(completion, with_usage=True).decode().split("\n\n") if line]
    first, last, usage = (json.loads(line.removeprefix("data: ")) for line in lines[:-1])
    called = completion["choices"][0]["message"]["tool_calls"][0]
    assert first["choices"][0]["delta"]["tool_calls"] == [{"index": 0, **called}]
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert (usage["choices"], lines[-1]) == ([], "data: [DONE]")
    assert usage["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}


@pytest.mark.parametrize(
    ("options", "is_asked"),
    [
        (None, False),
        ({}, False),
        ({"include_usage": False}, False),
        ("all", False),
        ({"include_usage": True}, True),
    ],
)
def test_only_a_stream_that_asks_for_usage_has_an_event_without_a_choice(
    options: object, is_asked: bool
) -> None:
    completion = chat_completion(Said(assistant_message("12", 0), TokenCounts(7, 2)), "trace")
    asked = has_usage({"stream": True, "stream_options": options})
    events = completion_events(completion, with_usage=asked).decode().split("\n\n")
    chunks = [json.loads(each.removeprefix("data: ")) for each in events if each and "[DONE]" not in each]
    assert asked is is_asked
    assert any(not each["choices"] for each in chunks) is is_asked
