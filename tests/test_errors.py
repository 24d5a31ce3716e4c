"""What errors of foreign code say, as text that can be stored and sent."""

from rollmill.tasks.errors import MAX_ERROR_CHARACTERS, error_text, printable


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
