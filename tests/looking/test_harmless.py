"""Text of any origin appears in markdown as it is."""

import json
import string

import pytest

from rollmill.tasks.look.terminal.markdown_escape import JOINER, MOST_BLOCK, escape_block, escape_inline


@pytest.mark.parametrize(
    "text",
    [
        "<b>",
        "![a](http://evil.example/x.png)",
        "| a |",
        "**a**",
        "`a`",
        "https://a.b",
        "a_b",
        "&lt;",
        "a\\",
        "# a",
    ],
)
def test_every_character_that_markdown_interprets_is_escaped(text: str) -> None:
    assert escape_inline(text) == "".join(
        f"\\{each}" if each in string.punctuation else each for each in text
    )


def test_inline_text_is_one_short_line() -> None:
    assert escape_inline("a\n# b\x1b[31m", 20) == "a \\# b␛\\[31m"
    assert escape_inline("x" * 500, 5) == "xxxxx…"


@pytest.mark.parametrize("n", [1, 3, 4, 17])
def test_no_fence_in_a_text_ends_its_block(n: int) -> None:
    text = f"a\n{'`' * n}\n<img src=x onerror=alert(1)>"
    first, *lines, last = escape_block(text)
    assert lines == text.split("\n")
    assert first == f"{last}text"
    assert set(last) == {"`"}
    assert len(last) > max(n, 2)


def test_a_character_by_name_is_read_as_it_was_written() -> None:
    (shown,) = escape_block("&lt;b&gt; a && b; &#60;")[1:-1]
    assert shown.replace(JOINER, "") == "&lt;b&gt; a && b; &#60;"
    assert shown.count(JOINER) == 3


def test_ten_megabytes_on_one_line_are_shortened_and_say_so() -> None:
    shown = "\n".join(escape_block("y" * 10_000_000 + "end"))
    assert len(shown) < MOST_BLOCK + 100
    assert f"{10_000_003 - MOST_BLOCK} characters more" in shown
    assert "end" in shown


def test_broken_unicode_and_controls_are_seen_and_can_be_sent() -> None:
    text = json.loads('"\\ud800 \\u202e \\u001b[2J \\u0000"')
    (shown,) = escape_block(text)[1:-1]
    assert shown == "<U+D800> <U+202E> ␛[2J ␀"
    shown.encode()
