"""The scorer `code`: what a program earns, and how it cannot earn more."""

import json
from pathlib import Path

import pytest

from rollmill.tasks.errors import ScoreError
from rollmill.tasks.sandbox.config import SandboxConfig
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.scorer import Candidate, Reward
from rollmill.tasks.score.scorers.code_scorer import CodeScorer, find_program, read_checks

CONFIG = ScoreConfig(sandbox=SandboxConfig(timeout_s=20.0))
ADD = ("assert add(1, 2) == 3", "assert add(-1, 1) == 0")
SUMS = ({"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "4 5", "stdout": "9"})


def score(program: str, config: ScoreConfig = CONFIG, **example: object) -> Reward:
    said = f"First\n```\nnot this\n```\nthen\n```python\n{program}\n```\nDone."
    candidate = Candidate("t", example, [{"role": "assistant", "content": said}], True)
    return CodeScorer.from_config(config).score(candidate)


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def add(a, b): return a + b", list(ADD)),
        ("def add(a, b): return a + b", json.dumps(ADD)),
        ("def add(a, b): return a + b", "def test_add():\n    assert add(1, 2) == 3"),
        ("def add(a, b): return a + b", "from solution import add as plus\nassert plus(1, 2) == 3"),
        ("def f(x): return x", "def check(candidate):\n    assert candidate([1, 2]) == [1, 2]\ncheck(f)"),
        # Values of all kinds go there and back.
        (
            "def f(*x, **y): return x, y",
            "x = [None, True, 2**100, .1, float('inf'), 1j, 'a', b'b', (1,), [[]], {1: {2}}, frozenset({3})]\n"
            "assert f(*x, y=x) == (tuple(x), {'y': x})\n"
            "assert [type(each) for each in f(*x)[0]] == [type(each) for each in x]",
        ),
        ("def f(x): x.sort()", "x = [3, 1]\nf(x)\nassert x == [1, 3]"),
        ("def f(g, x): return [g(each) for each in x]", "assert f(lambda y: y + 1, [1, 2]) == [2, 3]"),
        ("def f(x):\n    for i in range(x): yield i", "assert list(f(3)) == [0, 1, 2]"),
        (
            "def f(x): raise ValueError('no')",
            "try:\n    f(1)\nexcept ValueError as e:\n    assert str(e) == 'no'",
        ),
        # Python's own exceptions arrive with their arguments.
        ("def f(x): return {}[x]", "try:\n    f('a')\nexcept KeyError as e:\n    assert e.args == ('a',)"),
        (
            "def f(x): return x.decode()",
            "try:\n    f(b'\\xff')\nexcept UnicodeDecodeError as e:\n    assert e.start == 0",
        ),
        ("def f(): open('no')", "try:\n    f()\nexcept FileNotFoundError as e:\n    assert e.errno == 2"),
        ("def f(): raise ExceptionGroup('g', [OSError()])", "try:\n    f()\nexcept Exception:\n    pass"),
        ("def f(*, xs): xs.append(1)", "x = []\nf(xs=x)\nassert x == [1]"),
        ("def f(g): return g(1, x=2)", "assert f(lambda y, x: (y, x)) == (1, 2)"),
        (
            "def f(g):\n    try:\n        g()\n    except KeyError as e:\n        return e.args",
            "def g(): return {}[3]\nassert f(g) == (3,)",
        ),
        (
            "class Stack:\n    def __init__(self): self.all = []\n    def push(self, x): self.all.append(x)\n"
            "    def __len__(self): return len(self.all)\n    def __getitem__(self, i): return self.all[i]",
            "s = Stack()\nassert not s\ns.push('a')\nassert len(s) == 1 and s[0] == 'a' and s.all == ['a']\n"
            "s.all = [1, 2]\nassert len(s) == 2",
        ),
    ],
)
def test_a_right_program_passes(program: str, tests: object) -> None:
    reward = score(program, tests=tests)
    assert (reward.value, reward.components["passed"]) == (1.0, 1.0)


IN_UNITTEST = """\
import unittest
class TestAdd(unittest.TestCase):
    @classmethod
    def setUpClass(cls): cls.three = 3
    def setUp(self): self.one = 1
    def test_1(self): self.assertEqual(add(self.one, 2), self.three)
    def test_2(self):
        with self.subTest(): self.assertEqual(add(1, 1), 2)
if __name__ == "__main__":
    unittest.main()
"""
IN_PYTEST = """\
class TestAdd:
    def setup_method(self): self.one = 1
    def test_1(self): assert add(self.one, 2) == 3
    async def test_2(self): assert add(1, 1) == 2
"""
ASYNCHRONOUS = """\
import asyncio
async def test_1():
    await asyncio.sleep(0)
    assert add(1, 2) == 3
async def test_2(): assert add(1, 1) == 2
"""
ASYNCHRONOUS_UNITTEST = """\
from unittest import IsolatedAsyncioTestCase
class Checks(IsolatedAsyncioTestCase):
    async def test_1(self): self.assertEqual(add(1, 2), 3)
    async def test_2(self): self.assertEqual(add(1, 1), 2)
"""


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("def add(a, b): return a + b", 1.0),
        ("def add(a, b): return 3", 0.5),
        ("def other(): pass", 0.0),
        ("def add(a, b):\n    import os\n    os._exit(0)", 0.0),
    ],
)
@pytest.mark.parametrize("tests", [IN_UNITTEST, IN_PYTEST, ASYNCHRONOUS, ASYNCHRONOUS_UNITTEST])
def test_classes_and_asynchronous_functions_of_tests_are_run(tests: str, program: str, passed: float) -> None:
    reward = score(program, tests=tests)
    assert (reward.value, reward.components["passed"]) == (float(passed == 1.0), passed)


@pytest.mark.sandbox
@pytest.mark.parametrize(
    "tests",
    [
        "def test_1():\n    yield\n    assert add(1, 2) == 0",
        "import unittest\nclass T(unittest.TestCase):\n    @unittest.skip('')\n    def test_1(self): self.assertEqual(add(1, 2), 3)",
        "import unittest\nclass T(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls): raise OSError\n    def test_1(self): pass",
        "import unittest\nclass T(unittest.TestCase):\n    @classmethod\n    def tearDownClass(cls): raise OSError\n    def test_1(self): pass",
        "from unittest import TestCase\nclass T(TestCase):\n    def checks(self): assert add(1, 2) == 0",
    ],
    ids=["generator", "skipped", "class not set up", "class not torn down", "no method of a test"],
)
def test_tests_that_did_not_run_have_not_passed(tests: str) -> None:
    assert score("def add(a, b): return a + b", tests=tests).value == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        "",
        "import math",
        "METADATA = {}\ndef check(candidate):\n    assert candidate(1, 2) == 3",
        "import sys\nsys.setrecursionlimit(10**6)\ndef check(candidate):\n    assert candidate(1, 2) == 3",
        "if __name__ == '__main__':\n    assert add(1, 2) == 3",
        "async def check():\n    assert add(1, 2) == 3",
        "class Checks:\n    def test_1(self): assert add(1, 2) == 3",
        "class TestAdd:\n    def check(self): assert add(1, 2) == 3",
        "check = lambda: add(1, 2)",
    ],
)
def test_tests_that_run_nothing_are_a_failed_score(tests: str) -> None:
    with pytest.raises(ScoreError, match=r"run nothing: `tests` of the example, text 1.*check\(NAME\)"):
        read_checks({"tests": [ADD[0], tests]})


EQUAL_TO_ALL = """\
class All({base}):
    def __eq__(self, other): return True
    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    __hash__ = None
def add(a, b): return All()
"""


@pytest.mark.sandbox
@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "def add(a, b):\n    import os\n    os._exit(0)",
        "def add(a, b): raise SystemExit(0)",
        "raise AssertionError",
        "this is no Python",
        EQUAL_TO_ALL.format(base="object"),
        EQUAL_TO_ALL.format(base="int"),
        EQUAL_TO_ALL.format(base="list"),
        "def add(a, b):\n    import unittest.mock\n    return unittest.mock.ANY",
        # The verdict's lines, wherever this process could write them.
        "import os\nfor i in range(256):\n    try: os.write(i, b'true\\ntrue\\nend\\n')\n    except OSError: pass",
        "import glob\nfor each in glob.glob('/proc/*/fd/*'):\n    try: open(each, 'w').write('true\\ntrue\\nend\\n')\n    except OSError: pass",
        # The judge is its parent.
        "import os; os.kill(os.getppid(), 9)",
        "import os, signal; os.kill(os.getppid(), signal.SIGINT)",
        "import os; os.kill(-1, 9)",
        # Its first two calls give a test that passes and one that does not, the third ends the judge.
        "import os\ncalls = []\ndef add(a, b):\n    calls.append(1)\n    if len(calls) == 3: os.kill(os.getppid(), 9)\n    return 3",
        # Names that a test means to be Python's.
        "import builtins\nbuiltins.__build_class__ = builtins.AssertionError = None",
        "__builtins__ = {}\nAssertionError = ValueError = None",
        # What the tests expect is in the judge's memory, which cannot be read.
        "import os\nfor each in ('mem', 'maps', 'environ', 'fd/0'):\n    open(f'/proc/{os.getppid()}/{each}', 'rb').read()",
        "import gc\ndef add(a, b):\n    found = [each for each in gc.get_objects() if isinstance(each, list) and 'assert' in str(each)]\n"
        "    return 3 if found else None",
    ],
)
def test_a_program_cannot_fake_that_it_passes(program: str) -> None:
    reward = score(program, tests=[*ADD, "assert 'add' in sorted(['add'])", "assert add(2, 2) == 4"])
    assert reward.value == 0.0
    assert reward.components["passed"] < 1.0


@pytest.mark.sandbox
def test_an_answer_that_the_program_sends_by_itself_replaces_no_name_of_python() -> None:
    """Its process answers before it is asked: that it defines `sorted`, and then always 3, so that all that is sorted is equal."""
    program = """\
import json, os, struct
def send(value):
    changed = ["tuple", [["tuple", []], ["dict", []]]]
    body = json.dumps(["answer", ["returned", value, changed]]).encode()
    for i in range(3, 64):
        try: os.write(i, struct.pack(">I", len(body)) + body)
        except OSError: pass
names = ["sorted", "add"]
send(["tuple", [["list", names], ["list", [["mine", 0]] * len(names)]]])
for _ in range(9): send(3)
"""
    # The answers are taken: it may guess a result.
    assert score(program, tests="assert add(1, 2) == 3").value == 1.0
    assert score(program, tests="assert sorted([2, 1]) == sorted([9])").value == 0.0


@pytest.mark.sandbox
def test_a_program_does_not_find_what_is_expected_in_the_judges_memory() -> None:
    program = """\
import ctypes, os, re
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
def search(pid):
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            place, rights = line.split()[:2]
            if rights == "rw-p":
                first, last = (int(each, 16) for each in place.split("-"))
                memory.seek(first)
                if found := re.search(rb"EXPECTED(\\d+)", memory.read(last - first)):
                    return int(found[1])
def own(x): return search(os.getpid())
def add(a, b): return search(os.getppid())
"""
    # It finds what is in its own memory, here the argument.
    assert score(program, tests="assert own('EXPECTED17') == 17").value == 1.0
    assert score(program, tests="assert add(1, 2) == 918273645 # EXPECTED918273645").value == 0.0


@pytest.mark.sandbox
def test_the_reward_is_all_or_nothing_and_the_share_a_component() -> None:
    tests = [*ADD, "def test_a():\n    assert add(0, 0) == 0\ndef test_b():\n    assert add(5, 5) == 10"]
    reward = score("def add(a, b): return a + b if a < 5 else 0", tests=tests)
    assert (reward.value, reward.components["passed"]) == (0.0, 0.75)
    half = score("print(3)", cases=SUMS)
    assert (half.value, half.components["passed"]) == (0.0, 0.5)


@pytest.mark.sandbox
def test_a_program_reads_each_case_and_spaces_at_the_ends_of_lines_do_not_count() -> None:
    reward = score("a, b = map(int, input().split())\nprint(a + b, ' \\n')", cases=json.dumps(SUMS))
    assert (reward.value, reward.components["passed"]) == (1.0, 1.0)


@pytest.mark.sandbox
def test_a_right_output_with_a_failed_exit_does_not_pass() -> None:
    assert score("print(3); raise SystemExit(1)", cases=SUMS[:1]).value == 0.0


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("program", "limit"),
    [
        ("while True: pass", "time_limit"),
        ("print('x' * 10**8)", "output_limit"),
        ("import os\nos.write(2, bytes(10**7))", "output_limit"),
        (
            "import os, time\nfor i in range(3): os.fork()\nx = bytearray(90 << 20)\nx[::4096] = bytes(len(x) >> 12)\ntime.sleep(60)",
            "memory_limit",
        ),
    ],
)
@pytest.mark.parametrize("checks", ["cases", "tests"])
def test_a_program_that_is_stopped_has_no_reward_and_the_reason(
    program: str, limit: str, checks: str
) -> None:
    if checks == "tests" and limit == "output_limit":
        pytest.skip("what a program prints is not read where tests call it")
    slow = SandboxConfig(timeout_s=1.5 if limit == "time_limit" else 30.0, memory_bytes=256 << 20)
    reward = score(program, ScoreConfig(sandbox=slow), **{checks: list(SUMS if checks == "cases" else ADD)})
    assert reward.value == 0.0
    assert {name for name, value in reward.components.items() if value} == {limit}


@pytest.mark.sandbox
def test_all_programs_of_a_candidate_together_end_before_the_scorers_time_limit() -> None:
    """Otherwise a slow program would be a failed score, and many of them end the run."""
    config = ScoreConfig(timeout_s=2.0, sandbox=SandboxConfig(timeout_s=10.0))
    slow = score("import time; time.sleep(3); print(3)", config, cases=SUMS[:1])
    many = score("import time; time.sleep(0.9); print(3)", config, cases=[SUMS[0]] * 20)
    for reward in (slow, many):
        assert (reward.value, reward.components["time_limit"]) == (0.0, 1.0)


@pytest.mark.sandbox
def test_without_a_code_block_nothing_runs() -> None:
    candidate = Candidate("t", {"tests": ADD}, [{"role": "assistant", "content": "def add(a, b): ..."}], True)
    reward = CodeScorer.from_config(CONFIG).score(candidate)
    assert (reward.value, reward.components["no_code"]) == (0.0, 1.0)


def test_the_last_closed_block_is_the_program() -> None:
    assert find_program("```\na\n```\n ```py title\nb\nc\n```  \nthen ```not one``` ") == "b\nc\n"
    assert find_program("```python\na\n```\n```python\nnot closed") == "a\n"
    assert find_program("`a` and ```b```") is None
    assert find_program("```python\r\na\r\n```\r\n") == "a\n"


@pytest.mark.parametrize(
    "example",
    [
        {},
        {"tests": []},
        {"tests": ["x"], "cases": SUMS},
        {"tests": [1]},
        {"cases": [{"stdin": ""}]},
        {"cases": "x"},
    ],
)
def test_an_example_without_checks_is_a_failed_score(example: dict[str, object]) -> None:
    with pytest.raises(ScoreError, match="of the example"):
        read_checks(example)


def test_scores_with_different_limits_have_different_versions(tmp_path: Path) -> None:
    versions = [
        CodeScorer(ScoreConfig(sandbox=each)).version
        for each in (SandboxConfig(), SandboxConfig(unsafe=True), SandboxConfig(timeout_s=5.0))
    ]
    assert versions[0] == versions[1] != versions[2]
