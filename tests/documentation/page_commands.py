"""The commands of README and docs: in fences (`sh`; `console` with the output, commands after a `$`) or in a sentence between backticks."""

import re
from pathlib import Path
from typing import NamedTuple

from tests.documentation.documented_runs import NOT_RUN, REST, RUN_BY

ROOT = Path(__file__).parents[2]
GENERATED = {"settings.md"}
PAGES = [
    ROOT / "README.md",
    *(each for each in sorted((ROOT / "docs").rglob("*.md")) if each.name not in GENERATED),
]
PROGRAMS = {
    "rollmill", "make", "prefect", "docker", "kubectl", "python", "pip", "apt", "git", "cd", "export", "aws",
    "tensorboard", "hf", "openssl", "cp", "kill", "mkdir", "curl", "while", "umask",
}  # fmt: skip


class Command(NamedTuple):
    """A command as a page has it, without the remark behind it; the page is a path below docs, or README.md."""

    page: str
    text: str
    in_fence: bool

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def page_name(page: Path) -> str:
    """A page's path below docs, or README.md."""
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


def fences(page: Path) -> list[tuple[str, str]]:
    """Language and text of each fence."""
    return re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)


def is_command(span: str) -> bool:
    """True for a program that is called with something: `rollmill` alone is a name."""
    words = span.replace(".venv/bin/", "").split()
    return len(words) > 1 and words[0] in PROGRAMS and re.match(r"[\w./'\"\[-]", words[1]) is not None


def commands_of(page: Path) -> list[Command]:
    """Those in fences first, each in the page's order."""
    found = []
    for language, text in fences(page):
        lines = [line.strip() for line in re.sub(r" *\\\n *", " ", text).splitlines()]
        if language == "sh":
            found += [line for line in lines if line and not line.startswith("#")]
        if language == "console":
            found += [line[2:] for line in lines if line.startswith("$ ")]
    prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    spans = [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]
    name = page_name(page)
    return [Command(name, re.sub(r"\s+# .*", "", line), in_fence=True) for line in found] + [
        Command(name, span, in_fence=False) for span in spans if is_command(span)
    ]


COMMANDS = list(dict.fromkeys(each for page in PAGES for each in commands_of(page)))


def command_kind(text: str) -> str:
    """Program and sub-command: `rollmill run`, `kubectl apply`, `python -m benchmarks`."""
    words = re.sub(r"^(\w+=\S+ )*(\.venv(-vllm)?/bin/)?|-n rollmill ", "", text).split()
    if words[:2] == ["python", "-m"]:
        return f"python -m {words[2].split('.')[0]}"
    return " ".join(words[:2])


def find_runs() -> dict[Command, list[str]]:
    """The test files and reasons that documented_runs.py has for each command that it names."""
    found: dict[Command, list[str]] = {}
    for table in (RUN_BY, NOT_RUN):
        for page, entries in table.items():
            named = {text for texts in entries.values() for text in texts}
            for by, texts in entries.items():
                for text in texts:
                    rest = [
                        each
                        for each in COMMANDS
                        if each.in_fence and each.page == page and each.text not in named
                    ]
                    for command in rest if [text] == [*REST] else find_named(page, text):
                        found.setdefault(command, []).append(by)
    return found


def find_named(page: str, text: str) -> list[Command]:
    """The command of a page with this text; one in a fence, if it is in both."""
    found = [each for each in COMMANDS if (each.page, each.text) == (page, text)]
    return sorted(found, key=lambda each: not each.in_fence)[:1]


def commands_run_by(file: str) -> list[Command]:
    """The commands that a test file runs, in its order: for `pytest.mark.parametrize`."""
    path = Path(file).resolve().relative_to(ROOT).as_posix()
    return [command for command, by in find_runs().items() if path in by]


def find_command(file: str, part: str) -> str:
    """The text of the command that this is, or of the only one that has it, among those that a test file runs."""
    texts = [each.text for each in commands_run_by(file) if part in each.text]
    (found,) = [text for text in texts if text == part] or texts
    return found
