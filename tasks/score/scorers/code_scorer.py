"""The scorer `code`: runs the program that the policy wrote, in a sandbox, against tests or against cases of input and output."""

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from rollmill.tasks.errors import ScoreError
from rollmill.tasks.sandbox.sandbox import Sandbox, check_sandbox, open_sandbox, write_file
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.score_function import settings_version
from rollmill.tasks.score.scorer import Candidate, Reward
from rollmill.tasks.score.scorers import code_judge

FIELD = "score.sandbox"
JUDGE = Path(code_judge.__file__).read_text()
PYTHON = "python3"
PROGRAM = "program.py"
CALL_SHARE = 0.8
"""Share of score.timeout_s that programs of one candidate may take together: a slow program has reward 0, and is no failed score."""
LIMITS = ("time", "memory", "output", "files")
# A language's name and further words may follow the fence.
_OPENING, _CLOSING = re.compile(r"[ \t]*```[^`]*"), re.compile(r"[ \t]*```[ \t]*")


class CodeScorer:
    """1 if the program in the last code block of the policy's last message passes all tests or cases of the example, else 0.

    `example["tests"]` is Python with asserts, a text or a list of texts. `example["cases"]` is a list of {stdin, stdout}: the program reads
    the one and has to print the other, spaces at the ends of lines aside. Both may be JSON as text.

    Components: `passed`, the share that passed; of cases those before the first that did not, the last to be run. `no_code`: 1 without a
    code block. `time_limit`, `memory_limit`, `output_limit`, `files_limit`: 1 if a program was stopped for it.
    """

    name = "code"
    # Each program runs in a new sandbox.
    keeps_state = False

    def __init__(self, config: ScoreConfig) -> None:
        self._sandbox, self._limit_s = config.sandbox, CALL_SHARE * config.timeout_s
        # Slow programs pass with a longer time limit, so scores with different limits differ in their version.
        limits = config.sandbox.model_dump(mode="json", exclude={"unsafe"})
        self.version = settings_version(["2", limits])
        self._runner = asyncio.Runner()

    @classmethod
    def from_config(cls, config: ScoreConfig) -> Self:
        """Create the scorer; raises ConfigError if this machine has no sandbox for these settings."""
        check_sandbox(FIELD, config.sandbox)
        return cls(config)

    def score(self, candidate: Candidate) -> Reward:
        """Run the candidate's program and return its reward.

        Raises:
            ScoreError: the example has neither tests nor cases, they are malformed, or tests run nothing.
            SandboxError: no sandbox could be started.
        """
        tests, cases = read_checks(candidate.example)
        program = find_program(candidate.answer)
        if program is None:
            return _reward(0, 1, "", has_code=False)
        return self._runner.run(self._run_program(program, tests, cases))

    async def _run_program(
        self, program: str, tests: Sequence[str], cases: Sequence[tuple[str, str]]
    ) -> Reward:
        deadline = time.monotonic() + self._limit_s
        async with open_sandbox(FIELD, self._sandbox) as sandbox:
            if tests:
                return await _run_tests(sandbox, program, tests, self._limit_s)
            await write_file(sandbox, PROGRAM, program.encode(errors="replace"))
            for number, (given, expected) in enumerate(cases):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return _reward(number, len(cases), "time")
                done = await sandbox.run([PYTHON, PROGRAM], given.encode(errors="replace"), left_s)
                if not done.has_succeeded or _lines(done.stdout.decode(errors="replace")) != _lines(expected):
                    return _reward(number, len(cases), done.stopped_by)
            return _reward(len(cases), len(cases), "")


async def _run_tests(sandbox: Sandbox, program: str, tests: Sequence[str], timeout_s: float) -> Reward:
    given = json.dumps({"program": program, "tests": list(tests)}).encode()
    done = await sandbox.run([PYTHON, "-I", "-c", JUDGE], given, timeout_s)
    verdicts = done.stdout.decode(errors="replace").split()
    n_passed, is_whole = verdicts.count("true"), verdicts[-1:] == ["end"] and done.has_succeeded
    n = len(verdicts) - 1 if is_whole else max(len(tests), len(verdicts) + 1)
    return _reward(n_passed, n, done.stopped_by)


def _reward(n_passed: int, n: int, limit: str, *, has_code: bool = True) -> Reward:
    limits = {f"{each}_limit": float(each == limit) for each in LIMITS}
    components = {"passed": n_passed / n, "no_code": float(not has_code), **limits}
    return Reward(float(n_passed == n and has_code), components)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def find_program(answer: str) -> str | None:
    """Return the content of the last closed code block of a message; None without one.

    A block begins and ends with a line of three backticks.
    """
    found: str | None = None
    inside: list[str] | None = None
    for line in answer.replace("\r\n", "\n").split("\n"):
        if inside is None:
            inside = [] if _OPENING.fullmatch(line) else None
        elif _CLOSING.fullmatch(line):
            found, inside = "".join(inside), None
        else:
            inside.append(f"{line}\n")
    return found


def read_checks(example: Mapping[str, object]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the tests and the cases of an example; one of them is not empty.

    Raises:
        ScoreError: it has neither or both, they are malformed, or tests run nothing.
    """
    tests, cases = _parse(example.get("tests") or []), _parse(example.get("cases") or [])
    tests = [tests] if isinstance(tests, str) else tests
    if not isinstance(tests, Sequence) or not all(isinstance(each, str) for each in tests):
        raise ScoreError(f"expected a text or a list of texts as `tests` of the example, got {tests!r:.200}")
    if not isinstance(cases, Sequence) or not all(map(_is_case, cases)):
        raise ScoreError(
            f"expected a list of {{stdin, stdout}} as `cases` of the example, got {cases!r:.200}"
        )
    if bool(tests) == bool(cases):
        names = ", ".join(sorted(example)) or "none"
        raise ScoreError(f"expected `tests` or `cases` among the fields of the example, there are: {names}")
    for number, text in enumerate(tests):
        if code_judge.runs_nothing(text):
            raise ScoreError(
                f"the tests run nothing: `tests` of the example, text {number}, only defines {text!r:.200}; call what it defines, such as "
                "check(NAME), or write asserts outside of functions, functions test_..., or classes of unittest.TestCase or Test..."
            )
    return list(tests), [(each["stdin"], each["stdout"]) for each in cases]


def _parse(given: object) -> object:
    """Return a list that is JSON as text as a list, anything else unchanged: a data set's column may be text alone."""
    if isinstance(given, str) and given.lstrip().startswith("["):
        try:
            found = json.loads(given)
        except ValueError:
            return given
        return found if isinstance(found, list) else given
    return given


def _is_case(given: object) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(given.get(each), str) for each in ("stdin", "stdout")
    )
