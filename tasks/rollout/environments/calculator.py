"""Word problems with a calculator: `ann has 17 bags of 55 coins?`, call `<17*55>`, result `935|`, answer `935`."""

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType

import numpy as np

from rollmill.tasks.rollout.environment import Episode, Example, Message, Split, select_split

NAMES = ("ann", "ben", "eva", "joe", "kim", "leo", "mia", "tom")
THINGS = ("bags", "cups", "jars", "nets", "rows", "sets")
SMALLEST, LARGEST = 10, 99
CALL = re.compile(r"<(\d{1,6})([-+*])(\d{1,6})>")
NO_RESULT = "?|"


class Calculator:
    """Environment with problems a*b, a+b and a-b in words, which the policy may solve with a calculator.

    One problem in five is held out, chosen by its crc32.
    """

    name = "calculator"
    tools = ()
    stop = (">",)
    states: Mapping[str, str] = MappingProxyType({"calls": "list<string>", "results": "list<string>"})

    def size(self, split: Split) -> int:
        return len(_problems(split))

    async def example(self, split: Split, index: int) -> Example:
        problem, expression = _problems(split)[index]
        answer = str(calculate(f"<{expression}>")).removesuffix("|")
        return Example(expression, {"problem": problem, "expression": expression, "answer": answer})

    def episode(self, example: Example, seed: int) -> Episode:
        return CalculatorEpisode(str(example.content["problem"]))

    def warm_up_corpus(self, seed: int, n_examples: int) -> list[tuple[Message, ...]]:
        """Return noisy conversations about training problems."""
        random = np.random.default_rng([seed, 0xCA1C])
        problems = _problems("train")
        chosen = random.integers(len(problems), size=n_examples)
        return [
            noisy_student(problem, expression, random)
            for problem, expression in (problems[i] for i in chosen)
        ]


@dataclass(slots=True)
class CalculatorEpisode:
    """An episode in which the policy may call the calculator once; its message after the result is its answer."""

    problem: str
    calls: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        if not messages:
            return (Message("user", self.problem),)
        said = messages[-1].content
        if self.calls or not said.endswith(">"):
            return ()
        self.calls.append(said)
        self.results.append(calculate(said))
        return (Message("tool", self.results[-1]),)

    async def close(self) -> Mapping[str, object]:
        return {"calls": self.calls}

    def state(self) -> Mapping[str, object]:
        """Return the columns `calls` and `results`: the policy's calls of the calculator, and what it returned."""
        return {"calls": self.calls, "results": self.results}


def calculate(call: str) -> str:
    """Return the calculator's output for a call.

    Example: "<17*55>" gives "935|", and "<17*>" gives "?|".
    """
    match = CALL.fullmatch(call)
    if match is None:
        return NO_RESULT
    a, operator, b = int(match[1]), match[2], int(match[3])
    return f"{ {'+': a + b, '-': a - b, '*': a * b}[operator] }|"


@cache
def _problems(split: Split) -> tuple[tuple[str, str], ...]:
    """Return (problem, expression) of a split."""
    numbers = range(SMALLEST, LARGEST + 1)
    pairs = [(a, b) for a in numbers for b in numbers]
    every = [_in_words(a, b, operator) for a, b in pairs for operator in "*+-" if operator != "-" or a > b]
    return select_split({problem: (problem, expression) for problem, expression in every}, split)


def _in_words(a: int, b: int, operator: str) -> tuple[str, str]:
    """Return a word problem and its expression, such as "17*55", whose crc32 selects the person and thing in the text."""
    expression = f"{a}{operator}{b}"
    key = zlib.crc32(expression.encode())
    name, thing = NAMES[key % len(NAMES)], THINGS[key // len(NAMES) % len(THINGS)]
    words = {
        "*": f"{name} has {a} {thing} of {b} coins?",
        "+": f"{name} has {a} {thing} and gets {b}?",
        "-": f"{name} has {a} {thing} and loses {b}?",
    }
    return words[operator], expression


# Probabilities of an answer without a call for each operator, and of another operator, a misread number and a miscopied result.
WITHOUT_CALL = MappingProxyType({"*": 0.3, "+": 0.65, "-": 0.65})
WRONG_OPERATOR, MISREAD, MISCOPIED = 0.2, 0.15, 0.15


def noisy_student(problem: str, expression: str, random: np.random.Generator) -> tuple[Message, ...]:
    """Return one noisy conversation for the warm-up corpus.

    65 % of sums and differences and 30 % of products are answered without a call, with the first number of the problem. For
    the others the calculator is called, sometimes with another operator or a wrong digit in a number, and its result is
    copied, sometimes with a wrong digit.
    """
    opening = Message("user", problem)
    a, operator, b = re.split(r"([-+*])", expression)
    if random.random() < WITHOUT_CALL[operator]:
        return opening, Message("assistant", a)
    if random.random() < WRONG_OPERATOR:
        operator = str(random.choice([each for each in "*+-" if each != operator]))
    a, b = (_off_by_a_digit(each, random) if random.random() < MISREAD else each for each in (a, b))
    call = f"<{a}{operator}{b}>"
    printed = calculate(call)
    answer = printed.removesuffix("|")
    if random.random() < MISCOPIED:
        answer = _off_by_a_digit(answer, random)
    return opening, Message("assistant", call), Message("tool", printed), Message("assistant", answer)


def _off_by_a_digit(number: str, random: np.random.Generator) -> str:
    """Return a number with one digit replaced by another."""
    places = [place for place, character in enumerate(number) if character.isdigit()]
    place = int(random.choice(places))
    other = str((int(number[place]) + int(random.integers(1, 10))) % 10)
    return number[:place] + other + number[place + 1 :]
