"""A number to guess in five turns: `12 to 30:`, guess `21?`, hint `lower:`, guess `16?`, ..."""

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType

import numpy as np

from rollmill.tasks.rollout.environment import Episode, Example, Message, Split, select_split

LOWS, WIDTHS = range(10, 80), range(15, 21)
MAX_GUESSES = 5
GUESS = re.compile(r"(\d{1,4})\?")


@dataclass(frozen=True, slots=True)
class Secret:
    """A number to guess, and the range that the policy is given: low <= number <= high."""

    low: int
    high: int
    number: int


class Guess:
    """Environment in which the policy guesses a number in a range of width 15 to 20, with hints.

    One range in five is held out, chosen by its crc32.
    """

    name = "guess"
    tools = ()
    stop = ("?",)
    states: Mapping[str, str] = MappingProxyType({"guesses": "list<int64>", "won": "bool"})

    def size(self, split: Split) -> int:
        return len(_split_secrets(split))

    async def example(self, split: Split, index: int) -> Example:
        secret = _split_secrets(split)[index]
        content = {"problem": _opening(secret.low, secret.high), "answer": str(secret.number)}
        return Example(f"{secret.low}-{secret.high}/{secret.number}", content)

    def episode(self, example: Example, seed: int) -> Episode:
        return GuessEpisode(str(example.content["problem"]), int(str(example.content["answer"])))

    def warm_up_corpus(self, seed: int, n_examples: int) -> list[tuple[Message, ...]]:
        """Return games of training problems, played by rules with random mistakes, for the start model's supervised training."""
        random = np.random.default_rng([seed, 0x9E55])
        secrets = _split_secrets("train")
        return [noisy_student(secrets[i], random) for i in random.integers(len(secrets), size=n_examples)]


@dataclass(slots=True)
class GuessEpisode:
    """An episode that hints higher or lower until the number is found, five guesses are used, or a message is no guess."""

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
        if guess is None or self.is_won or self.guesses == MAX_GUESSES:
            return ()
        return (Message("user", hint(int(guess[1]), self.number)),)

    async def close(self) -> Mapping[str, object]:
        return {"guesses": self.guesses, "won": self.is_won}

    def state(self) -> Mapping[str, object]:
        """Return the guessed numbers in order, and whether the last one was right."""
        return {"guesses": self.numbers, "won": self.is_won}


def hint(guess: int, number: int) -> str:
    """Return the hint for a wrong guess: "higher:" if `number` is above it, else "lower:"."""
    return "higher:" if number > guess else "lower:"


def _opening(low: int, high: int) -> str:
    return f"{low} to {high}:"


@cache
def _split_secrets(split: Split) -> tuple[Secret, ...]:
    """Return the numbers to guess of a split, with their ranges."""
    ranges = {f"{low} {low + width}": (low, low + width) for low in LOWS for width in WIDTHS}
    secrets = {
        f"{low} {high} {number}": Secret(low, high, number)
        for low, high in select_split(ranges, split)
        for number in range(low, high + 1)
    }
    return tuple(secrets[key] for key in sorted(secrets, key=lambda key: zlib.crc32(key.encode())))


# Probabilities of the middle of the numbers that are still possible, and of the lowest of them.
MIDDLE, LOWEST = 0.3, 0.6


def noisy_student(secret: Secret, random: np.random.Generator) -> tuple[Message, ...]:
    """Return one noisy game for the warm-up corpus.

    60 % of the guesses are the lowest number that is still possible, 30 % are the middle of those, and the others are any
    number of the whole range.
    """
    low, high = secret.low, secret.high
    messages = [Message("user", _opening(low, high))]
    for turn in range(MAX_GUESSES):
        draw = random.random()
        if draw < MIDDLE:
            guess = (low + high) // 2
        elif draw < MIDDLE + LOWEST:
            guess = low
        else:
            guess = int(random.integers(secret.low, secret.high + 1))
        messages.append(Message("assistant", f"{guess}?"))
        if guess == secret.number or turn == MAX_GUESSES - 1:
            break
        messages.append(Message("user", hint(guess, secret.number)))
        low, high = (max(low, guess + 1), high) if secret.number > guess else (low, min(high, guess - 1))
    return tuple(messages)
