"""Every command of README and docs is one: parsed by the program that it calls, with settings that exist.

test_documented_runs.py checks that a test runs it.
"""

import importlib.util
import itertools
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer
from typer._click.exceptions import BadOptionUsage, MissingParameter
from typer.core import TyperGroup

from rollmill.flows.cli import app
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.presets import preset_values
from rollmill.flows.configuration.settings import apply_overrides, parse_settings
from tests.documentation.page_commands import COMMANDS, PAGES, PROGRAMS, ROOT, Command, fences

# A bash fence is a script; tests/deploy/test_two_nodes.py runs the one that there is.
LANGUAGES = {"sh", "bash", "console", "python", "yaml", "text", "mermaid", "json", "sql", "toml"}
PLACEHOLDERS = {
    "PRESET": "quickstart",
    "STEP": "3",
    "N": "3",
    "A": "1",
    "NAME@VERSION": "estimate@1",
    "RUN": "quickstart",
    "KIND": "process",
    "KEY=VALUE": "train.lr=1e-6",
    "...": "",
}


def words_of(text: str) -> list[str]:
    """The words of a command, without variables before it and a remark behind it; placeholders filled in."""
    listed = shlex.split(re.sub(r"\[--[^\]]*\]", "", text), comments=True)
    words = [re.sub(r"^\.venv(-vllm)?/bin/", "", word) for word in listed]
    while words and re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", words[0]):
        assert is_variable(words[0].partition("=")[0]), words[0]
        del words[0]
    filled = [PLACEHOLDERS.get(word, word) for word in words if word not in {"&", "|", "…"}]
    return [word for word in filled if word]


def is_variable(name: str) -> bool:
    """True for a variable that somebody reads: one of Prefect's settings, or one that our code names."""
    if name.startswith("PREFECT_"):
        from prefect.settings.legacy import _get_valid_setting_names
        from prefect.settings.models.root import Settings

        return name in _get_valid_setting_names(Settings)
    folders = ("flows", "tasks", "docs", "compose.yaml", "Makefile")
    searched = subprocess.run(
        ["git", "grep", "-qw", name, "--", *folders], cwd=ROOT, capture_output=True, check=False
    )
    return name.startswith("AWS_") or searched.returncode == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_code_fence_has_a_known_language(page: Path) -> None:
    assert [language for language, _ in fences(page) if language not in LANGUAGES] == []
    outside = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"(?<=\n\n)    \S.*", outside) == [], "a block that is indented instead of fenced"


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 60
    assert {command.page for command in COMMANDS} >= {
        "README.md",
        "how-to/operations.md",
        "how-to/rescoring.md",
        "tutorials/tutorial.md",
    }


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_documented_command_is_one(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = words_of(command.text)
    assert words[0] in PROGRAMS, f"nothing here knows the program {words[0]}"
    try:
        CHECKS[words[0]](words)
    except (MissingParameter, BadOptionUsage):
        assert not command.in_fence  # in a sentence a command may be named without its arguments


def rollmill_is_right(words: list[str]) -> None:
    """The command exists and takes these arguments; its preset and its settings exist."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    whole = typer.Context(group, info_name="rollmill")
    assert words[1] in group.commands, f"there is no command rollmill {words[1]}"
    command = group.commands[words[1]]
    context = command.make_context(words[1], words[2:], parent=whole)
    overrides = tuple(context.params.get("overrides") or ())
    preset = str(context.params.get("preset", "quickstart"))
    if (ROOT / "conf" / f"{preset.partition('+')[0]}.yaml").is_file():
        apply_overrides(preset_values(preset), overrides)
    if overrides and words[1] != "rescore":
        meant = tuple(re.sub(r"=N$", "=3", each) for each in overrides if each)
        parse_settings(RunConfig, apply_overrides({}, meant))


def make_is_right(words: list[str]) -> None:
    words = [re.sub(r"^(PYTHON|CXX)=.*", r"\1=true", word) for word in words]
    subprocess.run([*words, "--dry-run", "--silent"], cwd=ROOT, check=True, capture_output=True)


def prefect_is_right(words: list[str]) -> None:
    from prefect.cli._app import _app

    called, bound, *_ = _app.parse_args(words[1:], exit_on_error=False, print_error=False)
    assert called is not None, bound


def python_is_right(words: list[str]) -> None:
    if words[1].endswith(".py"):
        assert any(f"```python\n# {words[1]}:" in page.read_text() for page in PAGES), words
        return
    assert words[1] == "-m", words
    if words[2].startswith("vllm."):
        return  # in the other environment
    module = words[2].replace("NAME", "packing")
    assert importlib.util.find_spec(module) or (ROOT / f"{module.replace('.', '/')}.py").is_file(), module


def pip_is_right(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert words[1] == "install"
    for extra in re.findall(r"rollmill\[(\w[\w-]*)\]", " ".join(words)):
        assert extra in project["optional-dependencies"], extra


def docker_is_right(words: list[str]) -> None:
    if words[1] == "build":
        target = words[words.index("--target") + 1]
        assert re.search(rf"^FROM .* AS {target}$", (ROOT / "Dockerfile").read_text(), re.MULTILINE), target
        return
    assert words[1] in {"compose", "run"}, words
    files_are_there(words, {"-f", "--env-file"})


def kubectl_is_right(words: list[str]) -> None:
    assert set(words) & {"apply", "create", "delete", "get", "kustomize", "logs", "port-forward"}, words
    files_are_there(words, {"-k", "-f", "kustomize"})


def files_are_there(words: list[str], flags: set[str]) -> None:
    """What follows these flags is in the repository; `.env` is what a user makes."""
    named = {name for flag, name in itertools.pairwise(words) if flag in flags} - {".env"}
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def apt_is_right(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text() + (ROOT / "Dockerfile").read_text()
    assert words[1] == "install"
    known = {"make", "git"}
    assert [name for name in words[2:] if name not in known and name not in makefile] == []


def is_taken_as_it_is(words: list[str]) -> None:
    """Programs that are not ours, with little to be wrong: a file that is named has to be here."""
    assert words[1:], words


CHECKS = dict.fromkeys(PROGRAMS, is_taken_as_it_is) | {
    "rollmill": rollmill_is_right,
    "make": make_is_right,
    "prefect": prefect_is_right,
    "python": python_is_right,
    "pip": pip_is_right,
    "docker": docker_is_right,
    "kubectl": kubectl_is_right,
    "apt": apt_is_right,
}


@pytest.mark.parametrize("words", ["rollmill runn quickstart", "rollmill run quickstart --sett a=1", "foo --bar", "make quickstrat", "prefect worker strat", "PREFECT_APIURL=x rollmill up", "rollmill run quickstart --set train.learning_rate=1"])  # fmt: skip
def test_a_wrong_command_is_found(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BaseException, match=r"."):  # parsers exit in their own ways
        test_a_documented_command_is_one(Command("", words, True), monkeypatch)
