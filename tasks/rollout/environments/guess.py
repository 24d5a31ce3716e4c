"""A number to guess in five turns: `12 to 40:`, guess `26?`, hint `lower:`, guess `18?`, ..."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType

import numpy as np

from rollmill.tasks.rollout.environment import Episode, Example, Message, Split, select_split

LOWS, WIDTHS = range(10, 70), range(20, 31)
MAX_GUESSES = 5
GUESS = re.compile(r"(\d{1,4})\?")


@dataclass(frozen=True, slots=True)
class Secret:
    """A number to guess, and the range that the policy is given: low <= number <= high."""

    low: int
    high: int
    number: int


class Guess:
    """Environment in which the policy guesses a number in a range of width 20 to 30, with hints.

    One problem in five is held out, chosen by its crc32.
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
    every = [Secret(low, low + width, low + n) for low in LOWS for width in WIDTHS for n in range(width + 1)]
    return select_split({f"{each.low} {each.high} {each.number}": each for each in every}, split)


def noisy_student(secret: Secret, random: np.random.Generator) -> tuple[Message, ...]:
    """Return one noisy game for the warm-up corpus.

    A quarter of the guesses is the middle of the numbers that are still possible, half is any of those, and a quarter is
    any number of the whole range.
    """
    low, high = secret.low, secret.high
    messages = [Message("user", _opening(low, high))]
    for turn in range(MAX_GUESSES):
        draw = random.random()
        if draw < 0.25:
            guess = (low + high) // 2
        elif draw < 0.75:
            guess = int(random.integers(low, high + 1))
        else:
            guess = int(random.integers(secret.low, secret.high + 1))
        messages.append(Message("assistant", f"{guess}?"))
        if guess == secret.number or turn == MAX_GUESSES - 1:
            break
        messages.append(Message("user", hint(guess, secret.number)))
        low, high = (max(low, guess + 1), high) if secret.number > guess else (low, min(high, guess - 1))
    return tuple(messages)
