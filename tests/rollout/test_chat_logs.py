"""Logged conversations: the forms of logs that are read, which are kept, and the tokens of each."""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import chat_templates
import numpy as np
import polars as pl
import pytest
from model_families import save_byte_tokenizer
from tokenizers import Tokenizer

from rollmill.tasks.errors import ConfigError, EpisodeError
from rollmill.tasks.rollout.chat_logs.log_files import read_logs
from rollmill.tasks.rollout.chat_logs.logged_conversation import (
    LoggedConversation,
    drop_duplicates,
    parse_conversation,
)
from rollmill.tasks.rollout.chat_logs.logged_trajectory import build_logged_trajectory, place_in_group
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer

ASKED = {"role": "user", "content": "What do figs cost?"}

MARKED = "{% for each in messages %}{{ each.content }}<|im_start|>{% endfor %}"
"""Ends each message with a mark that is not the tokenizer's own end of sequence."""


def called_with(arguments: str) -> dict[str, Any]:
    """A message of the policy that asks for a price."""
    function = {"name": "price", "arguments": arguments}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


CALLING = called_with('{"fruit": "fig"}')
PRICED = {"role": "tool", "content": "7", "tool_call_id": "call_1"}
ANSWERED = {"role": "assistant", "content": "They cost 7."}
PRICE = {
    "type": "function",
    "function": {"name": "price", "parameters": {"type": "object", "properties": {}}},
}
CHAT = {"messages": [ASKED, CALLING, PRICED, ANSWERED], "tools": [PRICE], "id": 5, "answer": "7"}


def parse(**fields: Any) -> LoggedConversation:
    parsed = parse_conversation(CHAT | fields, "log:1")
    assert parsed is not None
    return parsed


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    folder = save_byte_tokenizer(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(chat_templates.QWEN3)
    return ChatTokenizer.load(folder)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def written(name: str, *lines: object) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)

    return written


def otel_value(value: object) -> dict[str, object]:
    match value:
        case list():
            return {"arrayValue": {"values": [otel_value(each) for each in value]}}
        case dict():
            pairs = [{"key": name, "value": otel_value(each)} for name, each in value.items()]
            return {"kvlistValue": {"values": pairs}}
        case int():
            return {"intValue": str(value)}
    return {"stringValue": str(value)}


def otel_line(attributes: dict[str, object]) -> dict[str, object]:
    """One line of the collector's file exporter."""
    span = {
        "traceId": "7b",
        "spanId": "2c",
        "startTimeUnixNano": "1700000000000000000",
        "endTimeUnixNano": "1700000001500000000",
        "attributes": [{"key": name, "value": otel_value(value)} for name, value in attributes.items()],
    }
    other = {"traceId": "7b", "spanId": "3d", "attributes": [{"key": "http.route", "value": otel_value("/")}]}
    return {"resourceSpans": [{"scopeSpans": [{"spans": [other, span]}]}]}


SAID = [
    {"role": "user", "parts": [{"type": "text", "content": "What do figs cost?"}]},
    {
        "role": "assistant",
        "parts": [{"type": "tool_call", "id": "call_1", "name": "price", "arguments": {"fruit": "fig"}}],
    },
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "call_1", "response": "7"}]},
]
REPLIED = [
    {
        "role": "assistant",
        "finish_reason": "length",
        "parts": [{"type": "text", "content": "They cost 7."}],
    }
]


@pytest.mark.parametrize("structured", [True, False])
def test_spans_of_opentelemetry_and_chats_are_the_same_conversations(
    write: Callable[..., str], structured: bool
) -> None:
    given: dict[str, object] = {
        "gen_ai.request.model": "qwen",
        "gen_ai.input.messages": SAID if structured else json.dumps(SAID),
        "gen_ai.output.messages": REPLIED if structured else json.dumps(REPLIED),
        "gen_ai.system_instructions": [{"type": "text", "content": "Be brief."}],
        "gen_ai.tool.definitions": [
            {"type": "function", "name": "price", "parameters": PRICE["function"]["parameters"]}
        ],  # type: ignore[index]
    }
    logs = read_logs([write("spans.jsonl", otel_line(given))])
    (found,) = logs.conversations
    chat = parse(messages=[{"role": "system", "content": "Be brief."}, *CHAT["messages"]])  # type: ignore[misc]
    assert found.messages == chat.messages
    assert found.log_id == "7b/2c"
    assert (found.model, found.finish_reason, found.duration_s) == ("qwen", "length", 1.5)
    assert found.started_at is not None
    assert found.started_at.timestamp() == 1_700_000_000
    assert [each["function"]["name"] for each in found.tools] == ["price"]
    assert not logs.left_out


def test_parquet_and_json_lines_are_the_same_conversations(tmp_path: Path, write: Callable[..., str]) -> None:
    lines = write("chats.jsonl", CHAT, {"messages": [ASKED]})
    frame = pl.DataFrame(
        {
            "messages": [CHAT["messages"], [ASKED]],
            "tools": [json.dumps([PRICE]), None],
            "id": ["5", None],
            "answer": ["7", None],
        }
    )
    (tmp_path / "folder").mkdir()
    frame.write_parquet(tmp_path / "folder" / "chats.parquet")
    one_log, other_log = read_logs([lines]), read_logs([str(tmp_path / "folder")])
    (one,), (other,) = one_log.conversations, other_log.conversations
    assert one.digest == other.digest
    assert dict(one.example) == dict(other.example) == {"answer": "7"}
    assert one_log.left_out == other_log.left_out == {"have no message of the policy": 1}


def test_what_was_said_after_the_last_answer_is_left_out() -> None:
    assert parse(messages=[ASKED, ANSWERED, ASKED]).messages == parse(messages=[ASKED, ANSWERED]).messages


def test_each_conversation_is_kept_once() -> None:
    long, other = parse(), parse(messages=[ASKED, ANSWERED], id=6)
    begun = parse(messages=[ASKED, CALLING], id=7)
    kept = drop_duplicates([begun, long, long, other], frozenset([other.digest]))
    assert kept.conversations == (long,)
    assert kept.left_out == {"are the beginning of another": 1, "occur twice": 1, "are imported already": 1}


def test_two_requests_that_said_the_same_are_two_conversations() -> None:
    one, other = parse(id=1), parse(id=2)
    assert one.digest != other.digest
    assert one.prompt_digest == other.prompt_digest
    assert drop_duplicates([one, other], frozenset()).conversations == (one, other)


def test_equal_answers_without_an_id_are_as_many_as_their_file_has(write: Callable[..., str]) -> None:
    line: dict[str, object] = {"messages": [ASKED, ANSWERED]}
    early, late = (line | {"started_at": time} for time in ("2026-11-01T08:00:00Z", "2026-11-01T09:00:00Z"))
    log = write("1.jsonl", line, line, early, late, line | {"id": 1}, line | {"id": 1})
    found = read_logs([log]).conversations
    kept = drop_duplicates(found, frozenset())
    assert kept.conversations == found[:5]
    assert kept.left_out == {"occur twice": 1}

    stored = frozenset(each.digest for each in found)
    longer = write("2.jsonl", line, line, early, late, line | {"id": 1}, line, late)
    more = drop_duplicates(read_logs([log, longer]).conversations, stored)
    assert [each.source for each in more.conversations] == [f"{longer}:{at}" for at in (6, 7)]


def test_the_tokens_are_those_that_the_policy_would_have_sampled(tokenizer: ChatTokenizer) -> None:
    built = build_logged_trajectory(parse(), tokenizer=tokenizer, stop=(), temperature=0.5)
    text = "".join(tokenizer.pieces(built.token_ids.tolist()))
    turns = [
        "".join(tokenizer.pieces(built.token_ids[each.start : each.start + each.n_tokens].tolist()))
        for each in built.turns
    ]
    call = (
        '<think>\n\n</think>\n\n\n<tool_call>\n{"name": "price", "arguments": {"fruit": "fig"}}\n</tool_call>'
    )
    (end,) = {tokenizer.pieces([each])[0] for each in tokenizer.eos_ids}
    assert turns == [call + end, "They cost 7." + end]
    assert text.count("What do figs cost?") == text.count("<tool_response>\n7\n</tool_response>") == 1
    assert built.loss_mask.sum() == sum(each.n_tokens for each in built.turns)
    assert np.isnan(built.logprobs).all()
    assert built.version_spans == ()
    assert (built.status, built.work.temperature) == ("complete", 0.5)
    placed = place_in_group(built, "run", 3, 1)
    assert (placed.work.trajectory_id, placed.work.group, placed.work.sample) == ("run.3.1.0", 3, 1)
    assert [message.content for message in placed.messages][-1] == "They cost 7."


@pytest.mark.parametrize(
    ("template", "end"), [(chat_templates.QWEN3, "<|im_end|>"), ("", "<|im_end|>"), (MARKED, "<|im_start|>")]
)
def test_of_several_ends_of_sequence_a_turn_has_that_of_the_chat_template(
    tmp_path: Path, template: str, end: str
) -> None:
    folder = save_byte_tokenizer(tmp_path / "model")
    if template:
        (folder / "chat_template.jinja").write_text(template)
    known = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [known.token_to_id(each) for each in ("<|im_end|>", "<|im_start|>", "<|endoftext|>")]
    # As published models declare them, that of base models among them.
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    said = [ASKED, ANSWERED, ASKED, ANSWERED]
    logged = parse_conversation({"messages": said}, "log:1")
    assert logged is not None
    tokenizer = ChatTokenizer.load(folder)
    built = build_logged_trajectory(logged, tokenizer=tokenizer, stop=(), temperature=1.0)
    text = "".join(tokenizer.pieces(built.token_ids.tolist()))
    assert text.count("They cost 7." + end) == 2
    assert "<|endoftext|>" not in text
    assert end * 2 not in text


def test_an_answer_that_was_cut_has_no_end(tokenizer: ChatTokenizer) -> None:
    cut = build_logged_trajectory(
        parse(finish_reason="length"), tokenizer=tokenizer, stop=(), temperature=1.0
    )
    assert cut.status == "truncated"
    assert int(cut.token_ids[-1]) not in tokenizer.eos_ids
    first = cut.turns[0]
    assert int(cut.token_ids[first.start + first.n_tokens - 1]) in tokenizer.eos_ids


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"prompt": "2+2="}, "no list `messages`"),
        ({"messages": [ANSWERED]}, "needs a prompt"),
        ({"messages": [ASKED, {"role": "judge", "content": ""}, ANSWERED]}, "role 'judge'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWERED]},
            "part of type image_url",
        ),
        ({"messages": [ASKED, ANSWERED], "started_at": "yesterday"}, "started_at"),
        ({"messages": [ASKED, ANSWERED], "started_at": 1e30}, "OverflowError"),
        ({"messages": [ASKED | {"content": "\ud83d"}, ANSWERED]}, "UnicodeEncodeError"),
        ({"messages": [ASKED, called_with('{"fruit": "\\ud83d"}'), PRICED, ANSWERED]}, "UnicodeEncodeError"),
        ({"messages": [ASKED, ANSWERED], "tools": [PRICE | {"description": "\ud83d"}]}, "UnicodeEncodeError"),
        ({"messages": [ASKED, ANSWERED], "model": "\ud83d"}, "UnicodeEncodeError"),
        ({"messages": [ASKED, 5]}, "Expected `object`"),
        ([1], "no JSON object"),
        ({"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": 3}]}]}]}, "another form than OTLP's"),
        (otel_line({"gen_ai.output.messages": [{"parts": [{"type": "blob"}]}]}), "part of type blob"),
        (otel_line({"gen_ai.output.messages": "They"}), "no JSON"),
        (otel_line({"gen_ai.output.messages": REPLIED}), "needs a prompt"),
    ],
)
def test_a_line_that_cannot_be_trained_on_is_named_and_stops_no_other(
    write: Callable[..., str], line: object, said: str
) -> None:
    logs = read_logs([write("bad.jsonl", CHAT, line, CHAT | {"id": 6})])
    assert [each.log_id for each in logs.conversations] == ["5", "6"]
    ((reason, n),) = logs.left_out.items()
    assert n == 1
    assert "bad.jsonl:2" in reason
    assert said in reason


def test_a_span_that_cannot_be_trained_on_stops_none_of_its_line(write: Callable[..., str]) -> None:
    line: Any = otel_line({"gen_ai.input.messages": SAID, "gen_ai.output.messages": REPLIED})
    (scope,) = line["resourceSpans"][0]["scopeSpans"]
    *others, good = scope["spans"]
    no_json = good | {"attributes": [{"key": "gen_ai.output.messages", "value": otel_value("They")}]}
    scope["spans"] = [*others, no_json, {"attributes": 3}, good | {"spanId": "last"}]
    logs = read_logs([write("spans.jsonl", line)])
    assert [each.log_id.endswith("/last") for each in logs.conversations] == [True]
    assert sum(logs.left_out.values()) == 2


def test_a_line_that_is_no_json_stops_the_import_unless_it_is_written_now(tmp_path: Path) -> None:
    log = tmp_path / "chats.jsonl"
    whole = json.dumps(CHAT) + "\n"
    log.write_text(whole + '{"messages": [')
    assert len(read_logs([str(log)]).conversations) == 1
    log.write_text('{"messages": [\n' + whole)
    with pytest.raises(ConfigError, match=r"chats\.jsonl:1"):
        read_logs([str(log)])


def test_a_parquet_column_that_is_no_json_is_no_example(tmp_path: Path) -> None:
    frame = pl.DataFrame({"messages": [[ASKED, ANSWERED]], "when": [datetime(2026, 1, 1)]})
    frame.write_parquet(tmp_path / "chats.parquet")
    logs = read_logs([str(tmp_path)])
    assert "datetime is not JSON serializable" in next(iter(logs.left_out))


def test_of_answers_with_the_same_text_one_is_left_out_for_each_that_was_continued() -> None:
    answers = [parse(messages=[ASKED, ANSWERED], id=number) for number in range(4)]
    further = parse(messages=[ASKED, ANSWERED, ASKED, ANSWERED], id=9)
    last = parse(messages=[ASKED, ANSWERED, ASKED, ANSWERED, ASKED, ANSWERED], id=10)
    kept = drop_duplicates([*answers, further, last], frozenset())
    assert kept.conversations == (*answers[1:], last)
    assert kept.left_out == {"are the beginning of another": 2}


def test_the_same_answer_with_another_rating_is_another_conversation() -> None:
    one, other = parse(id=None, rating=0), parse(id=None, rating=1)
    assert len(drop_duplicates([one, other, one], frozenset()).conversations) == 2


def test_calls_as_objects_and_reasoning_in_a_field_are_read() -> None:
    function = {"name": "price", "arguments": {"fruit": "fig"}}
    calling = {"role": "assistant", "content": "", "tool_calls": [{"id": None, "function": function}]}
    thinking = {"role": "assistant", "content": "7", "reasoning_content": "hm"}
    found = parse(messages=[ASKED, calling, {"role": "tool", "content": "7"}, thinking])
    assert found.messages[1].tool_calls[0]["function"]["arguments"] == {"fruit": "fig"}
    assert found.messages[3].content == "<think>\nhm\n</think>\n\n7"
    assert found.turn_digests()[0] == parse(messages=[ASKED, CALLING]).turn_digests()[0]


def test_reasoning_beside_content_in_parts_is_read() -> None:
    parts = [{"type": "text", "text": "7"}, {"type": "text", "text": "."}]
    thinking = {"role": "assistant", "content": parts, "reasoning": "hm"}
    assert parse(messages=[ASKED, thinking]).messages[1].content == "<think>\nhm\n</think>\n\n7."


def test_files_that_are_no_logs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("hello\n")
    (tmp_path / "broken.parquet").write_text("hello\n")
    for name, said in (
        ("missing", "no folder"),
        ("text.jsonl", "no JSON"),
        ("broken.parquet", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_logs([str(tmp_path / name)])


@pytest.mark.parametrize("template", ["", chat_templates.QWEN2])
def test_calls_need_a_chat_template_that_writes_them(tmp_path: Path, template: str) -> None:
    folder = save_byte_tokenizer(tmp_path / "plain")
    if template:
        (folder / "chat_template.jinja").write_text(template)
    plain = ChatTokenizer.load(folder)
    with pytest.raises(EpisodeError, match="policy's calls"):
        build_logged_trajectory(parse(), tokenizer=plain, stop=(), temperature=1.0)
