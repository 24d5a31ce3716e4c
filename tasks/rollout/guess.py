"""Guessing a number in five turns: `12 to 40:` -> `26?`, `lower:`, -> `18?`, ..."""

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType

import numpy as np

from tasks.rollout.environment import Episode, Example, Message, Split

LOWS, WIDTHS = range(10, 70), range(20, 31)
MOST_GUESSES = 5
HELD_OUT_MODULUS = 5
GUESS = re.compile(r"(\d{1,4})\?")


@dataclass(frozen=True, slots=True)
class Secret:
    """A number to be guessed, low <= number <= high."""

    low: int
    high: int
    number: int


class Guess:
    """Numbers in ranges of 20 to 30; one problem in five, by its crc32, is held out."""

    name = "guess"
    tools = ()
    stop = ("?",)
    states: Mapping[str, str] = MappingProxyType({"guesses": "list<int64>", "won": "bool"})

    def size(self, split: Split) -> int:
        return len(_secrets(split))

    async def example(self, split: Split, index: int) -> Example:
        secret = _secrets(split)[index]
        content = {"problem": _opening(secret.low, secret.high), "answer": str(secret.number)}
        return Example(f"{secret.low}-{secret.high}/{secret.number}", content)

    def episode(self, example: Example, seed: int) -> Episode:
        return GuessEpisode(str(example.content["problem"]), int(str(example.content["answer"])))

    def warm_up_corpus(self, seed: int, n_examples: int) -> list[tuple[Message, ...]]:
        """Noisy students' games over the training problems only."""
        random = np.random.default_rng([seed, 0x9E55])
        secrets = _secrets("train")
        return [noisy_student(secrets[i], random) for i in random.integers(len(secrets), size=n_examples)]


@dataclass(slots=True)
class GuessEpisode:
    """Says higher or lower until the number is found, five guesses are made, or something else is said."""

    problem: str
    number: int
    guesses: int = 0
    is_won: bool = False
    numbers: list[int] = field(default_factory=list)

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        if not messages:
            return (Message("user", self.problem),)
        guess = GUESS.fullmatch(messages[-1].content)
        self.guesses += 1
        self.numbers += [int(guess[1])] if guess else []
        self.is_won = guess is not None and int(guess[1]) == self.number
        if guess is None or self.is_won or self.guesses == MOST_GUESSES:
            return ()
        return (Message("user", hint(int(guess[1]), self.number)),)

    async def close(self) -> Mapping[str, object]:
        return {"guesses": self.guesses, "won": self.is_won}

    def state(self) -> Mapping[str, object]:
        """The numbers that were guessed, in order."""
        return {"guesses": self.numbers, "won": self.is_won}


def hint(guess: int, number: int) -> str:
    """What is said of a wrong guess."""
    return "higher:" if number > guess else "lower:"


def _opening(low: int, high: int) -> str:
    return f"{low} to {high}:"


@cache
def _secrets(split: Split) -> tuple[Secret, ...]:
    """Those of a split in the order of their crc32, so that any first part is a fair sample."""
    every = [Secret(low, low + width, low + n) for low in LOWS for width in WIDTHS for n in range(width + 1)]
    keyed = sorted(
        (zlib.crc32(f"{each.low} {each.high} {each.number}".encode()), i) for i, each in enumerate(every)
    )
    held_out = split == "held_out"
    return tuple(every[i] for key, i in keyed if (key % HELD_OUT_MODULUS == 0) == held_out)


def noisy_student(secret: Secret, random: np.random.Generator) -> tuple[Message, ...]:
    """One game of the warm-up corpus.

    A quarter of the guesses is the middle of what is still possible, half is any of that, and a quarter any
    number of the whole range.
    """
    low, high = secret.low, secret.high
    messages = [Message("user", _opening(low, high))]
    for turn in range(MOST_GUESSES):
        draw = random.random()
        if draw < 0.25:
            guess = (low + high) // 2
        elif draw < 0.75:
            guess = int(random.integers(low, high + 1))
        else:
            guess = int(random.integers(secret.low, secret.high + 1))
        messages.append(Message("assistant", f"{guess}?"))
        if guess == secret.number or turn == MOST_GUESSES - 1:
            break
        messages.append(Message("user", hint(guess, secret.number)))
        low, high = (max(low, guess + 1), high) if secret.number > guess else (low, min(high, guess - 1))
    return tuple(messages)
