"""A setting names a plug-in by its name, or as {name, args}; arguments are compared with its signature and reach its code."""

import json
import re
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import validate as validate_form
from typer.testing import CliRunner

from rollmill.flows.checks.plug_in_arguments import check_plug_in_arguments
from rollmill.flows.checks.preflight import preflight
from rollmill.flows.cli import app
from rollmill.flows.commands.deployment_run import run_deployment
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.forms import FORMS
from rollmill.flows.configuration.presets import merge_settings
from rollmill.flows.configuration.settings import apply_overrides, load, parse_settings, settings
from rollmill.flows.post_train import post_train
from rollmill.tasks.config import find_plugins, import_named
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.rollout.environment import ENVIRONMENTS, WITH_ARGUMENTS, make_environment
from rollmill.tasks.score.advantages import resolve_advantage
from rollmill.tasks.score.terms import resolve_terms
from rollmill.tasks.store.run.immutable_settings import get_setting
from rollmill.tasks.user_code.plug_in import PlugIn

MODULE = """
from rollmill.tasks.rollout.environments.addition import Addition

class Sized(Addition):
    name = "sized"
    def __init__(self, *, n: int, names: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.n, self.names = n, names
    def size(self, split): return self.n

class Configured(Addition):
    name = "configured"
    @classmethod
    def from_config(cls, config, *, n: int, names: tuple[str, ...] = ()):
        made = cls()
        made.n, made.names = n, names
        return made
    def size(self, split): return self.n

def scaled(candidate, *, n: int, names: tuple[str, ...] = ()):
    '''Return a number.

    Args:
        candidate: what is scored.
        n: a factor.
    '''
    return float(n * len(names))

class Scaled:
    name, version = "scaled", "3"
    def __init__(self, n: int, names: tuple[str, ...] = ()): self.n, self.names = n, names
    def score(self, candidate): return float(self.n * len(self.names))

def times(rewards, *, n: int, names: tuple[str, ...] = ()):
    return rewards * n * len(names)

def plain(candidate):
    return 0.5

class Negative:
    def __init__(self, *, limit: int) -> None:
        raise ValueError("limit must not be negative")
    def score(self, candidate): ...

def loss(inputs, *, temperature: float = 1.0): ...
"""
ENTRY_POINTS = """
[rollmill.environments]
sized = arguments_of_a_test:Sized
[rollmill.scorers]
scaled = arguments_of_a_test:scaled
[rollmill.advantages]
times = arguments_of_a_test:times
"""
ARGS = {"n": 3, "names": ["a", "b"]}
PLUG_INS = (
    "rollout.environment",
    "rollout.agent.problems",
    "score.scorer",
    "score.advantage",
    "evaluate.scorer",
)


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that an installed distribution registers too."""
    (tmp_path / "arguments_of_a_test.py").write_text(dedent(MODULE))
    information = tmp_path / "arguments_of_a_test-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: arguments-of-a-test\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    find_plugins.cache_clear()
    yield
    find_plugins.cache_clear()


def path(name: str) -> str:
    return f"arguments_of_a_test:{name}"


def configure(setting: str, name: str, args: object) -> RunConfig:
    """The settings with a plug-in, of which `args` are arguments."""
    return parse_settings(
        RunConfig, apply_overrides({}, (f"{setting}={json.dumps({'name': name, 'args': args})}",))
    )


@pytest.mark.parametrize("name", [path("Sized"), path("Configured"), "sized"])
def test_an_environment_is_created_with_its_arguments(name: str) -> None:
    environment: Any = make_environment(configure("rollout.environment", name, ARGS).rollout)
    assert (environment.size("train"), environment.names) == (3, ("a", "b"))


@pytest.mark.parametrize("name", [path("times"), "times"])
def test_an_advantage_is_called_with_its_arguments(name: str) -> None:
    advantage = resolve_advantage(configure("score.advantage", name, ARGS).score.advantage)
    assert advantage.of_group(np.array([1.0, 0.5])).tolist() == [6.0, 3.0]


def test_a_scorer_that_an_installed_distribution_registers_has_its_arguments() -> None:
    (part,) = resolve_terms(configure("score.scorer", "scaled", ARGS).score).parts
    assert part.function.call(None) == 6.0


def resolve_scorer(config: RunConfig) -> object:
    return resolve_terms(config.score)


def resolve_held_out_scorer(config: RunConfig) -> object:
    return resolve_terms(config.score, config.evaluate.scorer)


RESOLVE: dict[str, tuple[Callable[[RunConfig], object], str]] = {
    "rollout.environment": (lambda config: make_environment(config.rollout), "Sized"),
    "score.scorer": (resolve_scorer, "scaled"),
    "evaluate.scorer": (resolve_held_out_scorer, "Scaled"),
    "score.advantage": (lambda config: resolve_advantage(config.score.advantage), "times"),
}


@pytest.mark.parametrize("setting", RESOLVE)
@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"n": 3, "nmes": []}, "there is no nmes"),
        ({"n": True}, "n: Input should be a number, not true or false"),
        ({"n": "three"}, "n: Input should be a valid integer, unable to parse string as an integer"),
        ({"n": 3, "names": [1]}, "names.0: Input should be a valid string"),
        ({"names": []}, "n is missing"),
        ({}, "n is missing"),
    ],
)
def test_a_wrong_argument_is_refused_with_those_that_there_are(
    setting: str, args: object, problem: str
) -> None:
    resolve, name = RESOLVE[setting]
    with pytest.raises(ConfigError) as refused:
        resolve(configure(setting, path(name), args))
    takes = "it takes n: int, names: tuple[str, ...] = ()"
    assert str(refused.value) == f"{setting}.args = {args}: {problem}; {takes}"


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("rollout.environment", "addition"),
        ("score.scorer", "exact"),
        ("score.scorer", path("plain")),
        ("score.advantage", "mean"),
    ],
)
def test_arguments_of_a_plug_in_that_takes_none_are_refused(setting: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{setting}\.args = .*takes no arguments"):
        RESOLVE[setting][0](configure(setting, name, {"n": 1}))


def test_a_wrong_argument_of_one_of_several_environments_is_named_with_it() -> None:
    words = (
        "environments.one.rollout.environment={name: openenv, args: {url: host}}",
        "environments.one.weight=2",
    )
    with pytest.raises(ConfigError, match=r"environments\.one\.rollout\.environment\.args\.url = 'host'"):
        preflight(load("quickstart", words))


def test_a_wrong_argument_ends_a_run_before_its_start() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.environment\.args = {'k': 1}: there is no k"):
        preflight(load("quickstart", ("rollout.environment.args.k=1",)))


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("score.scorer.args.wrong=abc",), "score.scorer.args"),
        (("score.scorer=scaled", "score.scorer.args.n=x"), "score.scorer.args"),
        ((f"score.scorer={path('Scaled')}",), "score.scorer.args"),
        ((f"evaluate.scorer={path('scaled')}",), "evaluate.scorer.args"),
        ((f"score.sum=[{{scorer: '{path('Scaled')}'}}]",), "score.sum.0.scorer.args"),
        (("rollout.environment.args.k=1",), "rollout.environment.args"),
        (("rollout.environment=sized",), "rollout.environment.args"),
        ((f"rollout.environment={path('Configured')}",), "rollout.environment.args"),
        (("score.advantage=times",), "score.advantage.args"),
        (("score.advantage.args.k=1",), "score.advantage.args"),
        (
            ("environments.one.score.scorer=scaled", "environments.one.weight=2"),
            "environments.one.score.scorer.args",
        ),
    ],
)
def test_a_wrong_argument_is_refused_before_a_deployment_has_a_flow_run(
    words: tuple[str, ...], field: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{field} = ")):
        run_deployment(load("quickstart", words), "a", "quickstart", again=False, redo_failed=False)


@pytest.mark.slow
def test_a_wrong_argument_of_a_loss_is_refused_before_a_deployment_has_a_flow_run() -> None:
    config = load("quickstart", (f"train.loss={path('loss')}", "train.loss.args.temperature=hot"))
    with pytest.raises(ConfigError, match=r"^train\.loss\.args = {'temperature': 'hot'}: temperature:"):
        run_deployment(config, "a", "quickstart", again=False, redo_failed=False)


def test_arguments_of_what_only_the_worker_can_import_are_left_to_it() -> None:
    elsewhere = "{name: 'no_such_module:thing', args: {n: 1}}"
    names = ("rollout.environment", "score.scorer", "evaluate.scorer", "score.advantage", "train.loss")
    check_plug_in_arguments(load("quickstart", tuple(f"{name}={elsewhere}" for name in names)))


def test_the_command_settings_lists_the_arguments_of_the_plug_ins_that_are_given() -> None:
    given = (
        "score.scorer=scaled",
        f"train.loss={path('loss')}",
        "rollout.environment=nemo_gym",
        f"score.advantage={path('times')}",
    )
    words = [word for each in given for word in ("--set", each)]
    lines = (
        CliRunner()
        .invoke(app, ["settings", "quickstart", *words], env={"COLUMNS": "200"})
        .output.splitlines()
    )
    at = next(
        number for number, line in enumerate(lines) if line.startswith('score.scorer = "scaled" (fixed): ')
    )
    assert lines[at + 1 : at + 3] == [
        "score.scorer.args.n (int, required): a factor.",
        "score.scorer.args.names = [] (tuple[str, ...])",
    ]
    assert lines[at + 3].startswith("score.advantage = ")
    assert "train.loss.args.temperature = 1.0 (float)" in lines
    assert "rollout.environment.args.url (str, required): Address of the resources server." in lines


def test_the_command_settings_refuses_a_plug_in_that_is_not_there() -> None:
    shown = CliRunner().invoke(app, ["settings", "--set", "score.scorer=no_such_module:thing"])
    assert isinstance(shown.exception, ConfigError)
    assert "No module named 'no_such_module'" in str(shown.exception)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"args": {"n": 1}},
        {"name": "a", "arguments": {}},
        {"name": "a", "args": [1]},
        {"name": "a", "args": {"n": float("nan")}},
        {"name": "a", "args": {"n": "\0"}},
        {"name": "a", "args": {"n": "\ud800"}},
        5,
        ["a"],
        None,
    ],
)
def test_what_is_no_plug_in_is_refused(given: object) -> None:
    if given == {}:
        assert not PlugIn.model_validate(given)
        return
    with pytest.raises(ConfigError, match=r"^score\.scorer"):
        parse_settings(RunConfig, {"score": {"scorer": given}})


def test_any_text_may_be_an_argument() -> None:
    args = {"texts": ["\U0001f600", "\\u0000", "é"]}
    config = parse_settings(RunConfig, {"score": {"scorer": {"name": "a", "args": args}}})
    assert RunConfig.model_validate_json(config.model_dump_json()).score.scorer.args == args


def test_a_plug_in_without_arguments_is_stored_as_its_name() -> None:
    names = dict.fromkeys((*PLUG_INS, "train.loss"), "a:b")
    words = tuple(f"{setting}={name}" for setting, name in names.items())
    plain = parse_settings(RunConfig, apply_overrides({}, words))
    empty = tuple(f"{setting}={{name: {name}, args: {{}}}}" for setting, name in names.items())
    for stored in (plain.model_dump(mode="json"), plain.model_dump()):
        assert {name: get_setting(stored, name, None) for name in names} == names
    assert parse_settings(RunConfig, apply_overrides({}, empty)).model_dump_json() == plain.model_dump_json()
    assert str(plain.train.loss) == "a:b"


def test_overrides_give_a_name_one_argument_or_both() -> None:
    preset = {"score": {"scorer": "a:b"}, "train": {"loss": {"name": "c:d", "args": {"k": 1, "j": [2]}}}}
    words = (
        "score.scorer.args.n=3",
        "train.loss.args.k=0.5",
        "rollout.environment={name: e:f, args: {x: {y: 1}}}",
    )
    config = parse_settings(RunConfig, apply_overrides(preset, words))
    assert (config.score.scorer.name, config.score.scorer.args) == ("a:b", {"n": 3})
    assert (config.train.loss.name, config.train.loss.args) == ("c:d", {"k": 0.5, "j": [2]})
    assert config.rollout.environment.args == {"x": {"y": 1}}
    assert apply_overrides(preset, ("train.loss=cispo",))["train"]["loss"] == "cispo"
    assert apply_overrides(preset, ("train.loss.name=g:h",))["train"]["loss"]["name"] == "g:h"
    with pytest.raises(ConfigError, match="its name is missing"):
        parse_settings(RunConfig, apply_overrides({}, ("train.loss.args.k=1",)))


@pytest.mark.parametrize("setting", [*PLUG_INS, "train.loss", "environments.one.score.scorer"])
@pytest.mark.parametrize("name", ["", ".name"])
def test_an_override_of_an_argument_may_precede_that_of_the_name(setting: str, name: str) -> None:
    stored: dict[str, Any] = {}
    section = stored
    *sections, last = setting.split(".")
    for each in sections:
        section[each] = section = {}
    section[last] = {"name": "a:b", "args": {"old": 1}} if not name else "a:b"
    words = (
        f"{setting}.args.limit=3",
        f"{setting}.args.kind=x",
        f"{setting}{name}=c:d",
        f"{setting}.args.limit=4",
    )
    expected = {"name": "c:d", "args": {"limit": 4, "kind": "x"}}
    assert get_setting(apply_overrides(stored, words), setting, None) == expected
    assert get_setting(apply_overrides(stored, (words[2], *words[:2], words[3])), setting, None) == expected


def test_a_plug_in_of_a_later_preset_has_no_arguments_of_an_earlier_one() -> None:
    first = {"train": {"lr": 1, "loss": {"name": "a:b", "args": {"k": 1}}}}
    later = {"train": {"loss": {"name": "c:d", "args": {"j": 2}}}}
    assert merge_settings(first, later) == {"train": {"lr": 1, **later["train"]}}
    assert merge_settings(first, {"train": {"loss": "cispo"}})["train"]["loss"] == "cispo"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('rollout.environment_args={"url": "http://host"}', r"use rollout\.environment \({name: NAME, args:"),
        ("train.loss_options=[k=1]", r"use train\.loss \({name: NAME, args:"),
    ],
)
def test_the_former_settings_of_arguments_are_refused_with_what_to_write(old: str, new: str) -> None:
    with pytest.raises(ConfigError, match=new):
        load("quickstart", (old,))


def test_scorers_with_other_arguments_are_other_scorers() -> None:
    def key(args: object) -> str:
        terms = resolve_terms(configure("score.scorer", path("scaled"), args).score)
        return f"{terms.name}@{terms.version}"

    assert key({"n": 1, "names": []}) == key({"names": [], "n": 1})
    assert len({key({"n": n}) for n in range(3)}) == 3
    assert key({"n": 1}).startswith("arguments_of_a_test.scaled@1-")
    plain = configure("score.scorer", path("plain"), {}).score
    assert resolve_terms(plain).version == "1"


@pytest.mark.parametrize("scorer", ["scaled", "Scaled"])
def test_equal_scorers_have_one_version(scorer: str) -> None:
    def version(args: object) -> str:
        return resolve_terms(configure("score.scorer", path(scorer), args).score).version

    assert version({"n": 3}) == version({"n": "3"}) == version({"n": 3, "names": []})
    assert version({"n": 3, "names": ["a"]}) not in (version({"n": 3}), version({"n": 3, "names": ["b"]}))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("score.scorer.args=5", "score.scorer.args = 5: give a mapping of arguments, such as {limit: 100}"),
        (
            "score.advantage.args.factor=.nan",
            "score.advantage.args.factor = nan: Input should be a finite number",
        ),
    ],
)
def test_a_wrong_value_of_arguments_is_named(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load("quickstart", (word,))
    assert str(refused.value) == message


@pytest.mark.parametrize("setting", ["score.scorer", "evaluate.scorer", "rollout.environment"])
def test_a_value_that_a_constructor_refuses_is_named_as_an_argument(setting: str) -> None:
    resolve = RESOLVE[setting][0]
    expected = rf"^{setting}\.args = {{'limit': -1}}: ValueError: limit must not be negative \(.*\.py:\d+, in __init__\)$"
    with pytest.raises(ConfigError, match=expected):
        resolve(configure(setting, path("Negative"), {"limit": -1}))


FORM = "a plug-in has its arguments in args: give a name, or {name: NAME, args: {ARGUMENT: VALUE}}"


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("score.scorer.limit=5", "an argument is below args: give score.scorer.args.limit"),
        ("score.scorer={name: exact, limit: 5}", FORM),
        ("score.scorer={name: exact, arg: {limit: 5}}", FORM),
        ("score={scorer: exact, args: {limit: 5}}", FORM),
    ],
)
def test_arguments_in_a_wrong_place_are_refused_with_the_right_one(word: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(remedy)}$"):
        parse_settings(RunConfig, apply_overrides({"score": {"scorer": "exact"}}, (word,)))


def sum_of(*args: object) -> RunConfig:
    terms = [{"scorer": {"name": path("Scaled"), "args": each}} for each in args]
    return parse_settings(RunConfig, {"score": {"sum": terms}})


def test_a_sum_may_have_a_scorer_twice_with_other_arguments() -> None:
    parts = resolve_terms(sum_of({"n": 1}, {"n": 2}).score).parts
    assert [part.label for part in parts] == [part.function.key for part in parts]
    assert len({part.label for part in parts}) == 2
    with pytest.raises(ConfigError, match="give each scorer once"):
        resolve_terms(sum_of({"n": 1}, {"n": 1}).score)
    with pytest.raises(ConfigError, match=r"score\.sum\.1\.scorer\.args = .*there is no k"):
        resolve_terms(sum_of({"n": 1}, {"n": 1, "k": 1}).score)


def test_the_environments_of_rollmill_that_take_arguments_are_listed() -> None:
    """The form shows the arguments of these."""
    factories = {name: import_named("", name, ENVIRONMENTS) for name in ENVIRONMENTS}
    takes = {
        name: len(signature(getattr(factory, "from_config", factory)).parameters)
        > hasattr(factory, "from_config")
        for name, factory in factories.items()
    }
    assert tuple(sorted(name for name in ENVIRONMENTS if takes[name])) == WITH_ARGUMENTS


def shown(section: str, name: str) -> dict[str, Any]:
    """The field of a setting in the form of a run."""
    form = parameter_schema(post_train).model_dump()["properties"]["config"]["properties"]
    found: dict[str, Any] = form[section]["properties"][name]
    return found


def test_the_form_has_a_tab_for_a_name_one_for_arguments_and_one_for_each_environment_that_takes_some() -> (
    None
):
    tabs = shown("rollout", "environment")["anyOf"]
    assert [each["title"] for each in tabs] == ["Name", "Name and arguments", *WITH_ARGUMENTS]
    openenv = tabs[-1]["properties"]["args"]["properties"]
    assert {name: field["type"] for name, field in openenv.items()} == {
        **dict.fromkeys(("url", "command", "action", "observation"), "string"),
        **dict.fromkeys(("train", "held_out"), "integer"),
        "reset": "object",
    }
    assert openenv["train"]["minimum"] == 1
    # Prefect fills in defaults, which would be stored as given.
    assert not any("default" in field for field in openenv.values())
    assert all(field["description"] for field in openenv.values())
    for section, name in (("score", "scorer"), ("score", "advantage"), ("train", "loss")):
        assert [each["title"] for each in shown(section, name)["anyOf"]] == ["Name", "Name and arguments"]


@pytest.mark.parametrize(
    "given",
    [
        "addition",
        {"name": "openenv", "args": {"url": "http://host", "train": 5}},
        {"name": "a:b", "args": {"any": [1]}},
    ],
)
def test_what_the_form_gives_is_read(given: object) -> None:
    config = {"rollout": {"environment": given}, "score": {"scorer": given}}
    schema = parameter_schema(post_train).model_dump()
    assert validate_form({"run_name": "a", "config": config}, schema) == []
    read = post_train.validate_parameters({"run_name": "a", "config": config})["config"]
    assert read.model_dump(mode="json")["rollout"]["environment"] == given
    assert FORMS["post-train"].values(read)["score"]["scorer"] == given
    assert validate_form({"run_name": "a", "config": {"score": {"scorer": {"args": {}}}}}, schema)


def test_a_plug_in_is_one_setting() -> None:
    assert {name for name in settings() if name.startswith(PLUG_INS)} == set(PLUG_INS)
