"""Conversations as token ids: what the policy sampled is never written again."""

from pathlib import Path

import numpy as np
import pytest

from rollmill.tasks.errors import ConfigError, EpisodeError
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer, save_character_tokenizer
from rollmill.tasks.rollout.environment import Message

TEMPLATE = """
{%- if tools %}{{ 'tools:' + (tools | map('tojson') | join(' ')) + '<eos>|' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '(tool ' + message.name + ')' + message.content + '<eos>|' }}
{%- elif message.role == 'system' %}{{ raise_exception('no system role') }}
{%- else %}{{ '(' + message.role + ')' + message.content | trim + '<eos>|' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '(assistant)' }}{% endif %}
"""
"""In the manner of ChatML: each turn ends with an end of sequence, and a character after that."""

ASKED = Message("user", "2*3?")
CALLED = Message("assistant", "<2*3>")
PRINTED = Message("tool", "6", name="calc")


@pytest.fixture
def templated(tmp_path: Path) -> ChatTokenizer:
    save_character_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return ChatTokenizer.load(tmp_path)


@pytest.fixture
def plain(tmp_path: Path) -> ChatTokenizer:
    return ChatTokenizer.load(save_character_tokenizer(tmp_path))


def text(tokenizer: ChatTokenizer, ids: np.ndarray) -> str:
    """Ids as text, the end of a sequence written as `#`."""
    ends = np.isin(ids, list(tokenizer.eos_ids))
    return "".join("#" if end else tokenizer.decode(ids[i : i + 1]) for i, end in enumerate(ends))


def test_a_reply_begins_with_what_the_template_writes_after_the_policys_turn(
    templated: ChatTokenizer,
) -> None:
    (end,) = templated.eos_ids
    ended = templated.encode_reply((ASKED, CALLED), (PRINTED,), last_token=end)
    assert text(templated, ended) == "|(tool calc)6#|(assistant)"
    (stop,) = templated.stop_ids((">",))
    stopped = templated.encode_reply((ASKED, CALLED), (PRINTED,), last_token=stop)
    assert text(templated, stopped) == "#|(tool calc)6#|(assistant)"


def test_a_reply_does_not_depend_on_how_the_template_would_write_the_policys_words(
    templated: ChatTokenizer,
) -> None:
    spaced = Message("assistant", "  spaced ")
    trimmed, usual = (
        templated.encode_reply((ASKED, said), (PRINTED,), last_token=-1) for said in (spaced, CALLED)
    )
    assert trimmed.tolist() == usual.tolist()


def test_tools_are_given_to_the_template_as_plain_json(templated: ChatTokenizer) -> None:
    opening = text(templated, templated.encode((ASKED,), ({"name": "a<b"},)))
    assert "a<b" in opening
    assert opening.endswith("(user)2*3?#|(assistant)")
    assert "tools" not in text(templated, templated.encode((ASKED,)))


def test_without_a_template_texts_are_joined(plain: ChatTokenizer) -> None:
    assert text(plain, plain.encode((ASKED,))) == "2*3?"
    assert text(plain, plain.encode_reply((ASKED, CALLED), (PRINTED,), last_token=-1)) == "6"


def test_a_template_that_refuses_a_conversation_fails_the_episode_with_its_words(
    templated: ChatTokenizer,
) -> None:
    with pytest.raises(EpisodeError, match="no system role"):
        templated.encode((Message("system", "be brief"), ASKED))


def test_an_answer_ends_with_the_end_of_sequence_or_a_stop_text(plain: ChatTokenizer) -> None:
    assert text(plain, plain.encode_answer("6", (">",))) == "6#"
    assert text(plain, plain.encode_answer("<2*3>", (">",))) == "<2*3>"


def test_a_stop_text_of_several_tokens_is_refused(plain: ChatTokenizer) -> None:
    assert plain.stop_ids((">",)) == tuple(plain.encode((Message("user", ">"),)).tolist())
    with pytest.raises(ConfigError, match="must be one token"):
        plain.stop_ids(("ab",))
