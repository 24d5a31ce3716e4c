"""What errors of foreign code say, as text that can be stored and sent."""

import runpy
from pathlib import Path

import pytest

from rollmill.tasks.errors import (
    MAX_ERROR_CHARACTERS,
    ForeignError,
    describe_error,
    error_text,
    printable,
    user_error_text,
)


class MuteError(Exception):
    def __str__(self) -> str:
        raise KeyError("text")


def test_what_is_no_character_is_replaced_and_the_rest_stays() -> None:
    assert printable("a\ud800b") == "a?b"


def test_text_is_cut_at_its_limit() -> None:
    assert len(printable("x" * 10_000)) == MAX_ERROR_CHARACTERS


def test_an_error_that_cannot_say_what_it_is_says_what_its_text_raised() -> None:
    assert error_text(MuteError()) == "its text raised KeyError"
    assert error_text(ValueError("\ud800")) == "?"


def raise_in(folder: Path, code: str, name: str) -> Exception:
    """Run a module of a folder, and return what it raises."""
    (folder / name).write_text(code)
    try:
        runpy.run_path(str(folder / name))
    except Exception as error:  # noqa: BLE001 - whatever user code raises
        return error
    raise AssertionError("nothing was raised")


def test_an_error_of_user_code_has_the_users_frame_and_not_that_of_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import json\n\ndef parse(text):\n    return json.loads(text)\n\nparse('{')\n"
    error = raise_in(tmp_path, code, "rewards.py")
    assert user_error_text(error).endswith(f" ({tmp_path}/rewards.py:4, in parse)")
    monkeypatch.chdir(tmp_path)
    assert user_error_text(error).endswith(" (rewards.py:4, in parse)")
    assert describe_error(error) == ("JSONDecodeError", user_error_text(error))
    foreign = ForeignError(*describe_error(error))
    assert str(foreign) == f"JSONDecodeError: {user_error_text(error)}"
    assert describe_error(foreign) == describe_error(error)


def test_a_long_error_of_user_code_keeps_its_place(tmp_path: Path) -> None:
    text = user_error_text(raise_in(tmp_path, "raise ValueError('x' * 10_000)\n", "long.py"))
    assert len(text) == MAX_ERROR_CHARACTERS
    assert text.endswith("long.py:1, in <module>)")


def test_errors_of_rollmill_and_of_libraries_alone_have_no_place(tmp_path: Path) -> None:
    code = "from rollmill.tasks.errors import ToolError\nraise ToolError('no such tool')\n"
    assert user_error_text(raise_in(tmp_path, code, "tools.py")) == "no such tool"
    assert user_error_text(OSError("gone")) == "gone"
