"""What a model writes commands no terminal, paints over no other text, and loses no listing."""

import json
import os
import pty
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from rollmill.tasks.look.tables.view import escape_controls
from rollmill.tasks.look.terminal.output import encode_json, escape_json

HOSTILE = {
    "C1": "\x9b31m \x90payload\x9c",
    "DEL": "\x7f",
    "override": "\u202e\u2066 \u2028",
    "tag": "\U000e0041",
    "plain": "héllo 漢字 🙂 \x1b[31m\n",
}


def shown_on_terminal(program: str) -> str:
    """What a Python program writes to a terminal."""
    controller, terminal = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", program], stdout=terminal, close_fds=True) as process:
        os.close(terminal)
        found = bytearray()
        try:
            while part := os.read(controller, 4096):
                found += part
        except OSError:
            # Linux's end of a terminal whose last writer is gone.
            pass
    os.close(controller)
    assert process.returncode == 0
    return found.decode().replace("\r\n", "\n")


def test_json_on_a_terminal_has_no_controls_and_the_same_values() -> None:
    shown = shown_on_terminal(
        f"from rollmill.tasks.look.terminal.output import print_json; print_json({HOSTILE!r})"
    )
    assert all(each.isprintable() for each in shown.replace("\n", ""))
    assert "héllo 漢字 🙂" in shown
    assert json.loads(shown) == HOSTILE


def test_json_in_a_file_has_the_characters_themselves() -> None:
    program = f"from rollmill.tasks.look.terminal.output import print_json; print_json({HOSTILE!r})"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout.decode()
    assert "\x9b31m" in found
    assert json.loads(found) == json.loads(escape_json(found)) == HOSTILE


@pytest.mark.parametrize("indent", [0, 2])
def test_half_a_surrogate_pair_loses_no_listing(indent: int) -> None:
    began = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    values = {"began": began, "reward": float("nan"), 3: ("a", {"x": 1.5})}
    expected = json.loads(encode_json(values, indent))
    found = encode_json({**values, "text": "half \ud83d"}, indent)
    assert b"half \\ud83d" in found
    assert json.loads(found) == {**expected, "text": "half \ud83d"}
    assert expected == {"began": "2026-01-02T03:04:05+00:00", "reward": None, "3": ["a", {"x": 1.5}]}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a" + 200 * "\u0301" + "b", "a" + 4 * "\u0301" + "<+196 marks>b"),
        ("ก" + 5 * "\u0e47", "ก" + 4 * "\u0e47" + "<+1 mark>"),
        ("a" + 3 * "\u0301\u20dd" + "\x1b", "a" + 2 * "\u0301\u20dd" + "<+2 marks>␛"),
    ],
)
def test_marks_that_would_be_painted_over_other_lines_are_counted(text: str, shown: str) -> None:
    assert escape_controls(text) == shown


@pytest.mark.parametrize("text", ["Việt Nam", "שָׁלוֹם", "हिन्दी", "ภาษาไทย ที่นี่", "👩‍🚀", "e\u0301"])
def test_words_with_marks_stay_as_they_are(text: str) -> None:
    assert escape_controls(text) == text
