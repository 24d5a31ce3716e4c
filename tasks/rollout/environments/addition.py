"""Two-digit addition with visible work: the answer to `47+38=` is `[7+8=15 4+3+1=8]85`."""

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from rollmill.tasks.rollout.environment import Episode, Example, Message, SingleTurn, Split, select_split

SMALLEST, LARGEST = 10, 99
LARGEST_COLUMN = 9 + 9 + 1


class Addition:
    """Environment with problems a+b= of two-digit a and b; one in five is held out, chosen by the problem's crc32."""

    name = "addition"
    tools: Sequence[Mapping[str, object]] = ()
    stop: Sequence[str] = ()

    def size(self, split: Split) -> int:
        return len(_problems(split))

    async def example(self, split: Split, index: int) -> Example:
        a, b = _problems(split)[index]
        return Example(example_id=f"{a}+{b}", content={"problem": f"{a}+{b}=", "answer": str(a + b)})

    def episode(self, example: Example, seed: int) -> Episode:
        return SingleTurn((Message("user", str(example.content["problem"])),))

    def warm_up_corpus(self, seed: int, n_examples: int) -> list[tuple[Message, ...]]:
        """Return conversations of training problems with noisy answers."""
        random = np.random.default_rng([seed, 0x5EED])
        problems = _problems("train")
        chosen = (problems[i] for i in random.integers(len(problems), size=n_examples))
        return [
            (Message("user", f"{a}+{b}="), Message("assistant", noisy_student(a, b, random)))
            for a, b in chosen
        ]


@cache
def _problems(split: Split) -> tuple[tuple[int, int], ...]:
    numbers = range(SMALLEST, LARGEST + 1)
    return select_split({f"{a}+{b}=": (a, b) for a in numbers for b in numbers}, split)


# Probabilities of an answer without work, and of such an answer being right; of a wrong sum of a column.
WITHOUT_WORK, GUESSED_RIGHT, SLIP = 0.53, 0.05, 0.2


def noisy_student(a: int, b: int, random: np.random.Generator) -> str:
    """Return one noisy answer for the warm-up corpus.

    53 % of the answers show no work, and nearly all of those are one too low. 47 % show their work: each column sum is
    wrong with probability 0.2, and the next column continues with the wrong sum.

    Example: noisy_student(47, 38, ...) may be "84", "[7+8=15 4+3+1=8]85" or "[7+8=14 4+3+1=8]84".
    """
    if random.random() < WITHOUT_WORK:
        return str(a + b if random.random() < GUESSED_RIGHT else a + b - 1)
    ones = _add_with_slip(a % 10 + b % 10, random)
    carry = ones // 10
    tens = _add_with_slip(a // 10 + b // 10 + carry, random)
    carried = f"+{carry}" if carry else ""
    work = f"[{a % 10}+{b % 10}={ones} {a // 10}+{b // 10}{carried}={tens}]"
    return f"{work}{tens}{ones % 10}"


def _add_with_slip(total: int, random: np.random.Generator) -> int:
    """Return the column sum `total`; with probability `SLIP` another sum that two digits and a carry can have."""
    if random.random() >= SLIP:
        return total
    other = int(random.integers(LARGEST_COLUMN))
    return other if other < total else other + 1
