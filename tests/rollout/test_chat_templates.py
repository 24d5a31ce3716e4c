"""Chat templates of all kinds give the text and the token ids that transformers gives, and load no torch."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import chat_templates
import pytest
from model_families import save_byte_tokenizer
from transformers import AutoTokenizer

from rollmill.tasks.errors import ConfigError, EpisodeError
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer
from rollmill.tasks.rollout.environment import Message

FAMILIES = {
    name: getattr(chat_templates, name)
    for name in ("QWEN2", "QWEN3", "LLAMA3", "MISTRAL", "GEMMA", "GENERATION")
}
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "price",
            "description": "Price of a <fruit>, in €.",
            "parameters": {"type": "object", "properties": {"fruit": {"type": "string"}}},
        },
    },
)
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "price", "arguments": {"fruit": 'Äpfel & "figs"'}},
}
ASKED = Message("user", "What is 2*3?\n")
ANSWERED = Message("assistant", "<think>\nTwo threes.\n</think>\n\nIt is 6. ")
ASKED_AGAIN = Message("user", "And a fig's price?")
CONVERSATIONS: dict[str, tuple[Message, ...]] = {
    "one turn": (ASKED,),
    "a system message": (Message("system", " Be brief."), ASKED),
    "several turns": (ASKED, ANSWERED, ASKED_AGAIN),
    "a tool call": (
        ASKED,
        Message("assistant", "", tool_calls=(CALL,)),
        Message("tool", "7", name="price", tool_call_id="abcdefghi"),
    ),
}
REFUSED = {("GEMMA", "a system message"), ("GEMMA", "a tool call")}

SaveModel = Callable[[object], Path]


@pytest.fixture
def save(tmp_path: Path) -> SaveModel:
    """Save a tokenizer with this chat template, or with this list of named ones; returns the folder."""

    def saved(template: object) -> Path:
        folder = save_byte_tokenizer(tmp_path / "model")
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
        return folder

    return saved


def render(folder: Path, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[str, list[int]]:
    """Text and token ids by the class that transformers takes for a folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    arguments: dict[str, Any] = {"tools": list(tools) or None, "add_generation_prompt": True}
    turns = [each.as_json() for each in messages]
    text = tokenizer.apply_chat_template(turns, tokenize=False, **arguments)
    return text, tokenizer.apply_chat_template(turns, **arguments)["input_ids"]


def compare(folder: Path, messages: Sequence[Message], tools: Sequence[Any]) -> str:
    """Compare our rendering with that of transformers; returns the text."""
    tokenizer = ChatTokenizer.load(folder)
    ids = tokenizer.encode(messages, tools).tolist()
    text, expected = render(folder, messages, tools)
    assert ids == expected
    assert "".join(tokenizer.pieces(ids)) == text
    return text


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_is_rendered_as_transformers_renders_it(
    save: SaveModel, family: str, conversation: str, tools: Sequence[Any]
) -> None:
    folder, messages = save(FAMILIES[family]), CONVERSATIONS[conversation]
    if (family, conversation) in REFUSED:
        with pytest.raises(EpisodeError, match=r"not supported|must alternate"):
            ChatTokenizer.load(folder).encode(messages, tools)
        return
    text = compare(folder, messages, tools)
    if tools and family in {"QWEN3", "LLAMA3", "MISTRAL"}:
        assert '"name": "price", "description"' in " ".join(text.split())


TOOLS_AFTER_CALLS = """
{%- for message in messages %}
{%- if message.role == "tool" and not loop.previtem.tool_calls %}{{ raise_exception("no call") }}{% endif %}
{{- "(" + message.role + ")" + message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.arguments }}{% endfor %}|
{%- endfor %}
{%- if add_generation_prompt %}(assistant){% endif %}
"""


@pytest.mark.parametrize("conversation", ["several turns", "a tool call"])
@pytest.mark.parametrize("family", [*FAMILIES, "TOOLS_AFTER_CALLS"])
def test_the_policy_speaks_again_without_a_reply_where_the_template_allows_it(
    save: SaveModel, family: str, conversation: str
) -> None:
    folder = save(FAMILIES.get(family, TOOLS_AFTER_CALLS))
    tokenizer, answer = ChatTokenizer.load(folder), Message("assistant", "It is 6.")
    said = (*CONVERSATIONS[conversation], answer)
    # The policy's own calls are in the text of its messages, and some templates refuse the tool's message after those.
    own = tuple(replace(each, content=each.content or "call", tool_calls=()) for each in said)
    try:
        added = tokenizer.encode_reply(own, (), TOOLS, last_token=-1)
    except EpisodeError:
        assert family in {"MISTRAL", "GEMMA"}
        return
    text, _ = render(folder, said, TOOLS)
    assert text.endswith(answer.content + "".join(tokenizer.pieces(added.tolist())))


@pytest.mark.parametrize("family", ["QWEN2", "LLAMA3", "GENERATION"])
def test_a_reply_continues_what_transformers_renders(save: SaveModel, family: str) -> None:
    folder = save(FAMILIES[family])
    tokenizer, answer = ChatTokenizer.load(folder), Message("assistant", "It is 6.")
    added = tokenizer.encode_reply((ASKED, answer), (ASKED_AGAIN,), last_token=-1)
    joined = [*tokenizer.encode((ASKED,)), *tokenizer._ids(answer.content), *added]
    text, _ = render(folder, (ASKED, answer, ASKED_AGAIN), ())
    assert "".join(tokenizer.pieces(joined)) == text


def test_blocks_of_the_policys_words_are_rendered(save: SaveModel) -> None:
    text = compare(save(chat_templates.GENERATION), (ASKED, ANSWERED, Message("user", "stop"), ASKED), ())
    assert ANSWERED.content + "<|im_end|>\n<|im_start|>user\nstop<|im_end|>\n" in text
    assert text.count(ASKED.content) == 1, "the loop was left"


def test_tools_are_written_as_json_with_the_templates_arguments(save: SaveModel) -> None:
    text = compare(save(chat_templates.JSON_ARGUMENTS), (Message("user", "Ä"),), TOOLS)
    assert text.startswith(json.dumps(TOOLS, indent=4, ensure_ascii=False))
    assert '[{"type":"function","function":{"name":"price"' in text
    assert '"Price of a <fruit>, in €.", "name": "price"' in text
    assert "\\u00c4" in text


def test_of_named_templates_tools_choose_the_one_for_tools(save: SaveModel) -> None:
    named = [
        {"name": "default", "template": "plain: {{ messages[0].content }}"},
        {"name": "tool_use", "template": "{{ tools | length }} tools: {{ messages[0].content }}"},
    ]
    folder = save(named)
    assert ChatTokenizer.load(folder).has_template
    assert compare(folder, (ASKED,), ()) == f"plain: {ASKED.content}"
    assert compare(folder, (ASKED,), TOOLS) == f"1 tools: {ASKED.content}"


def test_named_templates_without_one_for_this_conversation_refuse_it(save: SaveModel) -> None:
    tokenizer = ChatTokenizer.load(save([{"name": "rag", "template": "x"}]))
    with pytest.raises(EpisodeError, match=r"no default specified.*rag"):
        tokenizer.encode((ASKED,))


def test_templates_in_separate_files_are_found(save: SaveModel) -> None:
    folder = save("in the settings")
    (folder / "chat_template.jinja").write_text("in a file: {{ messages[0].content }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(
        "for tools: {{ messages[0].content }}"
    )
    assert compare(folder, (ASKED,), ()) == f"in a file: {ASKED.content}"
    assert compare(folder, (ASKED,), TOOLS) == f"for tools: {ASKED.content}"


def test_a_template_that_is_not_valid_is_refused_with_its_line_where_it_is_from(save: SaveModel) -> None:
    folder = save("{{ messages }}\n{% for %}")
    with pytest.raises(ConfigError, match=r"model = .*not valid Jinja \(line 2: Expected an expression"):
        ChatTokenizer.load(folder)
    with pytest.raises(ConfigError, match=r"rollout\.chat_template = '{%'.*not valid Jinja \(line 1"):
        ChatTokenizer.load(folder, "{%")


def test_a_given_template_takes_the_place_of_the_models_with_its_arguments(
    save: SaveModel, tmp_path: Path
) -> None:
    folder, file = save(chat_templates.QWEN3), tmp_path / "my.jinja"
    file.write_text("{{ messages[0].content }}{{ tools | length }}{{ mood }}")
    for given in (str(file), file.read_text()):
        tokenizer = ChatTokenizer.load(folder, given, '{"mood": "Ä"}')
        ids = tokenizer.encode((Message("user", "a"),), TOOLS).tolist()
        assert "".join(tokenizer.pieces(ids)) == "a1Ä"
    with pytest.raises(ConfigError, match=r"rollout\.chat_template = 'none\.jinja': give the path"):
        ChatTokenizer.load(folder, "none.jinja")


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("messages[0].content + 1", "can only concatenate"),
        ("1 / 0", "division by zero"),
        ("messages[9].content", "has no element 9"),
    ],
)
def test_an_error_in_a_templates_expression_fails_the_episode(
    save: SaveModel, expression: str, reason: str
) -> None:
    tokenizer = ChatTokenizer.load(save(f"{{{{ {expression} }}}}"))
    with pytest.raises(EpisodeError, match=f"refuses a conversation of user: .*{reason}"):
        tokenizer.encode((ASKED,))


def test_a_broken_tokenizer_is_named_with_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        ChatTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a model folder with a fast tokenizer"):
        ChatTokenizer.load(tmp_path)


def test_rendering_with_tools_imports_no_torch(save: SaveModel) -> None:
    folder = save(chat_templates.QWEN3)
    script = (
        "import sys; from pathlib import Path\n"
        "from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer\n"
        "from rollmill.tasks.rollout.environment import Message\n"
        "print('transformers' in sys.modules)\n"
        f"ids = ChatTokenizer.load(Path({str(folder)!r})).encode((Message('user', 'a'),), {TOOLS!r})\n"
        "print(len(ids) > 50, 'transformers' in sys.modules, 'torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    assert shown.stdout.split() == ["False", "True", "True", "False"]
