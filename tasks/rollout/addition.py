"""Two-digit addition with visible work: `47+38=` is answered by `[7+8=15 4+3+1=8]85`."""

import zlib
from functools import cache

import numpy as np

from tasks.rollout.environment import Episode, Example, Message, SingleTurn, Split

SMALLEST, LARGEST = 10, 99
LARGEST_COLUMN = 9 + 9 + 1
HELD_OUT_MODULUS = 5


class Addition:
    """Problems a+b= with two-digit a and b; one in five, by the crc32 of the problem, is held out."""

    name = "addition"
    tools = ()
    stop = ()

    def size(self, split: Split) -> int:
        return len(_problems(split))

    async def example(self, split: Split, index: int) -> Example:
        a, b = _problems(split)[index]
        return Example(example_id=f"{a}+{b}", content={"problem": f"{a}+{b}=", "answer": str(a + b)})

    def episode(self, example: Example, seed: int) -> Episode:
        return SingleTurn((Message("user", str(example.content["problem"])),))

    def warm_up_corpus(self, seed: int, n_examples: int) -> list[tuple[Message, ...]]:
        """Problems and noisy students' answers, over the training problems only."""
        random = np.random.default_rng([seed, 0x5EED])
        problems = _problems("train")
        chosen = (problems[i] for i in random.integers(len(problems), size=n_examples))
        return [
            (Message("user", f"{a}+{b}="), Message("assistant", noisy_student(a, b, random)))
            for a, b in chosen
        ]


@cache
def _problems(split: Split) -> tuple[tuple[int, int], ...]:
    """Problems of a split in the order of their crc32, so that any first part is a fair sample."""
    numbers = range(SMALLEST, LARGEST + 1)
    keyed = sorted((zlib.crc32(f"{a}+{b}=".encode()), a, b) for a in numbers for b in numbers)
    held_out = split == "held_out"
    return tuple((a, b) for key, a, b in keyed if (key % HELD_OUT_MODULUS == 0) == held_out)


def noisy_student(a: int, b: int, random: np.random.Generator) -> str:
    """One answer of the warm-up corpus.

    Of the students 30 % answer without work, and two thirds of them are off in one digit; 70 % show their
    work, in which each column slips with probability 0.2, and the slip is carried on.

    Example: noisy_student(47, 38, ...) may be "[7+8=15 4+3+1=8]85", "[7+8=14 4+3+1=8]84" or "75".
    """
    if random.random() < 0.3:
        return str(a + b if random.random() < 1 / 3 else _off_by_a_digit(a + b, random))
    ones = _slipped(a % 10 + b % 10, random)
    carry = ones // 10
    tens = _slipped(a // 10 + b // 10 + carry, random)
    carried = f"+{carry}" if carry else ""
    work = f"[{a % 10}+{b % 10}={ones} {a // 10}+{b // 10}{carried}={tens}]"
    return f"{work}{tens}{ones % 10}"


def _slipped(total: int, random: np.random.Generator) -> int:
    """A column's sum, or with probability 0.2 any other sum that two digits and a carry can have."""
    if random.random() >= 0.2:
        return total
    other = int(random.integers(LARGEST_COLUMN))
    return other if other < total else other + 1


def _off_by_a_digit(total: int, random: np.random.Generator) -> int:
    return total + int(random.choice([-10, -1, 1, 10]))
