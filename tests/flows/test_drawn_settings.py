"""Settings drawn at random: each is refused by one message before anything is started, or accepted."""

import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from rollmill.flows import cli
from rollmill.flows.checks import attached, preflight
from rollmill.flows.commands.stored_runs import evaluate_config, rescore_config, retrain_config
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.presets import merge_settings, preset_values
from rollmill.flows.configuration.settings import load, validate
from rollmill.tasks.config import StageConfig
from rollmill.tasks.errors import RollmillError
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.writable_run import OpenRun

LONGEST_MESSAGE = 3000
REPOSITORY = Path(__file__).parents[2]


def list_fields(
    model: type[StageConfig], prefix: tuple[str, ...] = ()
) -> list[tuple[tuple[str, ...], FieldInfo]]:
    """Every setting and every section, by the parts of its name."""
    found: list[tuple[tuple[str, ...], FieldInfo]] = []
    for name, field in model.model_fields.items():
        found.append(((*prefix, name), field))
        if isinstance(field.annotation, type) and issubclass(field.annotation, StageConfig):
            found += list_fields(field.annotation, (*prefix, name))
    return found


def list_ends(field: FieldInfo) -> list[Any]:
    """Values at and beyond the ends of a setting's range, and its choices."""
    bounds = [
        bound
        for each in field.metadata
        for name in ("ge", "gt", "le", "lt")
        if (bound := getattr(each, name, None))
    ]
    choices = [each for each in getattr(field.annotation, "__args__", ()) if isinstance(each, str)]
    return [*choices, *(bound + off for bound in (0, *bounds) for off in (-1, -1e-9, 0, 1e-9, 1))]


FIELDS = list_fields(RunConfig)
SECTIONS = {name.rpartition(".")[0] for name in (".".join(path) for path, _ in FIELDS)}
# Paths and addresses, import paths, and texts that are special for a terminal, a folder, YAML or a log.
TEXTS = [
    *(
        "",
        " ",
        ".",
        "..",
        "/",
        "~",
        "~/x",
        "a/../b",
        "/proc/1/x",
        "/dev/null",
        "/dev/full",
        "x" * 5000,
        "\x00",
        "\ud800",
    ),
    *(
        "\x1b[31m",
        "a\nb",
        "\u202eabc",
        "日本語",
        "é" * 300,
        "-1",
        "1e400",
        "nan",
        "null",
        "true",
        "[]",
        "{}",
        "{'a': 1}",
    ),
    *(
        "http://",
        "http://[",
        "http://127.0.0.1:99999",
        "http://a:b@c",
        "s3:/x",
        "s3://",
        "s3://b/../x",
        "file:///x",
    ),
    *(
        "0.0.0.0",
        "::",
        "999.9.9.9",
        "nosuch.invalid",
        "sys:exit",
        "os:nosuch",
        "nosuch:f",
        ":f",
        "builtins:print",
        "a:b:c",
    ),
    *(
        "verifiers:nosuch",
        "verifiers:",
        "json:JSONDecoder",
        "__main__:x",
        "PATH",
        "ROLLMILL_X",
        "%s%n",
        "{0}",
        "${HOME}",
    ),
]
SCALARS = st.one_of(
    st.sampled_from(TEXTS),
    st.none() | st.booleans() | st.floats() | st.integers(-(2**70), 2**70) | st.text(max_size=20),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 1e30, math.inf, math.nan, b"x"]),
)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=5), SCALARS, max_size=2)


TEXT_FIELDS = [each for each in FIELDS if each[1].annotation is str]


@st.composite
def changes(draw: st.DrawFn) -> dict[str, Any]:
    """One to three settings, nested as in a preset; most values are of the right type, and every second setting is a text."""
    values: dict[str, Any] = {}
    fields = st.sampled_from(TEXT_FIELDS) | st.sampled_from(FIELDS)
    single = st.lists(fields, min_size=1, max_size=1)
    for path, field in draw(st.one_of(single, single, single, st.lists(fields, min_size=2, max_size=3))):
        fitting = st.sampled_from(TEXTS if field.annotation is str else list_ends(field))
        value = draw(st.one_of(*[fitting] * 7, VALUES))
        for name in reversed(path):
            value = {name: value}
        values = merge_settings(values, value)
    return values


Check = Callable[[dict[str, Any]], None]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Check one change of the quickstart's settings, in a folder without anything."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"vllm": "0.32.0"}\'\n')
    python.chmod(0o700)
    base = merge_settings(preset_values("quickstart"), {"serve": {"python": str(python)}})
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(attached, "ATTACH_TIMEOUT_S", 0.2)
    ours = psutil.Process()
    before = set(ours.children(recursive=True))

    def one(values: dict[str, Any]) -> None:
        try:
            preflight.preflight(validate(merge_settings(base, values)))
        except RollmillError as error:
            message = str(error)
            assert 0 < len(message) < LONGEST_MESSAGE
            assert "Traceback" not in message
        assert set(ours.children(recursive=True)) <= before
        assert list(Path.cwd().iterdir()) == []

    return one


def within(budget_s: float, check: Check) -> Check:
    """Check what comes until the time is used up, and nothing afterwards."""
    end = time.monotonic() + budget_s
    return lambda values: check(values) if time.monotonic() < end else None


UNHURRIED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@pytest.mark.slow
def test_drawn_settings_are_refused_or_accepted(check: Check) -> None:
    timed = within(12.0, check)

    # The same examples each time, so that a change is what makes it fail.
    @settings(max_examples=400, derandomize=True, suppress_health_check=UNHURRIED, phases=[Phase.generate])
    @given(changes())
    def draw(values: dict[str, Any]) -> None:
        timed(values)

    draw()


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Call the commands that start flows with one change, if it is a wrong one, in a folder with one stored run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").symlink_to(REPOSITORY / "conf")
    config = validate(preset_values("quickstart")).model_dump(mode="json")
    stored = RunFolder(tmp_path / "runs" / "old")
    with OpenRun.open(stored, config=config, fixed={}, versions={}, git_commit="", config_of=StoreConfig()):
        pass
    prepare: dict[tuple[str, ...], Callable[[tuple[str, ...]], object]] = {
        ("run", "quickstart"): partial(load, "quickstart"),
        ("collect", "quickstart"): partial(load, "quickstart"),
        ("evaluate", "old"): partial(evaluate_config, "old"),
        ("retrain", "old", "--name", "new"): partial(retrain_config, "old"),
        ("rescore", "old"): partial(rescore_config, stored),
    }
    ours = psutil.Process()
    children, files = set(ours.children(recursive=True)), sorted(tmp_path.rglob("*"))

    def one(values: dict[str, Any]) -> None:
        overrides = tuple(f"{name}={json.dumps(value)}" for name, value in list_leaves(values))
        for words, check in prepare.items():
            with suppress(RollmillError):
                check(overrides)
                # Accepted: the command would start a flow.
                continue
            options = [each for override in overrides for each in ("--set", override)]
            monkeypatch.setattr("sys.argv", ["rollmill", *words, *options])
            with pytest.raises(SystemExit) as end:
                cli.run_command()
            said = capsys.readouterr()
            assert (end.value.code, said.out) == (2, ""), (words, overrides)
            assert said.err.startswith("rollmill: ")
            assert "Traceback" not in said.err
            assert len(said.err) < LONGEST_MESSAGE
            assert set(ours.children(recursive=True)) <= children
            assert sorted(tmp_path.rglob("*")) == files

    return one


def list_leaves(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Every setting of a nested change by its dotted name; a value that JSON cannot express is left out."""
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, dict) and value and f"{prefix}{name}" in SECTIONS:
            found += list_leaves(value, f"{prefix}{name}.")
        else:
            with suppress(TypeError):
                json.dumps(value)
                found.append((f"{prefix}{name}", value))
    return found


@pytest.mark.slow
def test_commands_that_start_flows_refuse_drawn_settings_before_anything_starts(refuse: Check) -> None:
    timed = within(8.0, refuse)

    @settings(max_examples=400, derandomize=True, suppress_health_check=UNHURRIED, phases=[Phase.generate])
    @given(changes())
    def draw(values: dict[str, Any]) -> None:
        timed(values)

    # One that is wrong for certain.
    refuse({"train": {"lr": -1}})
    draw()


@pytest.mark.long
def test_settings_that_nobody_has_drawn_yet_are_refused_or_accepted(check: Check) -> None:
    end = time.monotonic() + 240.0

    @settings(max_examples=100, suppress_health_check=UNHURRIED, database=None)
    @given(changes())
    def draw(values: dict[str, Any]) -> None:
        check(values)

    while time.monotonic() < end:
        draw()
