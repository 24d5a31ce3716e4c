"""A run that stored arguments in separate settings is read, resumed and forked as if it had them where they are today."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.settings import SETTINGS_BY_STEP, find_fixed_settings, validate
from rollmill.tasks.errors import ConfigError, RunMismatchError
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import open_files, publish_text, read_text
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.former_settings import read_former
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.train.config import TrainConfig, with_settings

GIVEN = {
    "model": "m",
    "score": {"scorer": "environment"},
    "rollout": {"environment": {"name": "openenv", "args": {"url": "http://host:1"}}},
    "train": {"loss": {"name": "a:b", "args": {"k": 0.5, "sides": [1]}}},
}


def open_run(root: Path, given: dict[str, Any]) -> OpenRun:
    return OpenRun.open(
        RunFolder(root / "a"),
        config=validate(given).model_dump(mode="json"),
        fixed=find_fixed_settings(),
        versions={},
        git_commit="",
        config_of=StoreConfig(root=str(root)),
        by_step=SETTINGS_BY_STEP,
    )


def store_former(folder: RunFolder, given: dict[str, Any]) -> None:
    """Give run.json the form in which an older Rollmill stored the settings."""
    stored = json.loads(read_text(open_files(folder), "run.json"))
    rollout, train = stored["config"]["rollout"], stored["config"]["train"]
    environment, loss = rollout["environment"], train["loss"]
    if isinstance(environment, dict):
        rollout |= {"environment": environment["name"], "environment_args": json.dumps(environment["args"])}
    else:
        rollout["environment_args"] = ""
    if isinstance(loss, dict):
        options = [f"{name}={json.dumps(each)}" for name, each in loss["args"].items()]
        train |= {"loss": loss["name"], "loss_options": options}
    else:
        train["loss_options"] = []
    stored["earlier_settings"] = [
        {
            "until_step": 0,
            "settings": {"train.loss": train["loss"], "train.loss_options": train["loss_options"]},
        }
    ]
    publish_text(open_files(folder), "run.json", json.dumps(stored).encode())


@pytest.mark.parametrize("names", [(), ("rollout", "train")])
def test_an_older_run_is_resumed_with_the_same_arguments(tmp_path: Path, names: tuple[str, ...]) -> None:
    given = {name: each for name, each in GIVEN.items() if name in ("model", "score", *names)}
    if not names:
        given["rollout"] = {"environment": "addition"}
    with open_run(tmp_path, given) as run:
        written = run.manifest.config
    store_former(run.folder, given)
    stored = read_manifest(run.folder)
    assert stored.config == written
    assert validate(stored.config) == validate(given)
    assert stored.earlier_settings[0].settings == {"train.loss": written["train"]["loss"]}
    with open_run(tmp_path, given) as resumed:
        assert resumed.manifest.config == written
    assert json.loads(read_text(open_files(run.folder), "run.json"))["config"] == written


def test_an_older_run_is_not_resumed_with_other_arguments(tmp_path: Path) -> None:
    with open_run(tmp_path, GIVEN) as run:
        pass
    store_former(run.folder, GIVEN)
    other = {**GIVEN, "rollout": {"environment": {"name": "openenv", "args": {"url": "http://host:2"}}}}
    with pytest.raises(RunMismatchError, match=r"rollout\.environment: the run has .*host:1.*host:2"):
        open_run(tmp_path, other)


def test_the_arguments_of_an_agent_are_for_its_problems() -> None:
    stored = {"rollout": {"environment": "agent", "agent": {"problems": "x:Y", "url": "http://a"}}}
    stored["rollout"]["environment_args"] = '{"n": 3}'
    rollout = read_former(stored)["rollout"]
    assert rollout["environment"] == "agent"
    assert rollout["agent"] == {"problems": {"name": "x:Y", "args": {"n": 3}}, "url": "http://a"}


def test_an_environment_of_several_has_its_arguments_or_those_of_the_run() -> None:
    rollout = {"environment": "openenv", "environment_args": '{"url": "http://a"}'}
    entries = [
        {"name": "own", "rollout": {"environment_args": '{"url": "http://b"}'}},
        {"name": "other", "rollout": {"environment": "nemo_gym"}},
        {"name": "same", "rollout": {"temperature": 0.5}},
        {"name": "none"},
    ]
    found = read_former({"rollout": rollout, "environments": entries})["environments"]
    assert [each.get("rollout") for each in found] == [
        {"environment": {"name": "openenv", "args": {"url": "http://b"}}},
        {"environment": {"name": "nemo_gym", "args": {"url": "http://a"}}},
        {"temperature": 0.5},
        None,
    ]


def test_settings_of_today_are_not_changed() -> None:
    for config in (
        RunConfig().model_dump(mode="json"),
        validate(GIVEN).model_dump(mode="json"),
        {},
        {"train": 3},
    ):
        assert read_former(config) == config


@pytest.mark.parametrize("text", ["{", "[1", 3])
def test_what_cannot_be_read_is_refused_by_name(text: object) -> None:
    stored = read_former({"rollout": {"environment": "openenv", "environment_args": text}})
    with pytest.raises(ConfigError, match=r"rollout\.environment_args"):
        validate(stored)


def test_a_loss_with_arguments_is_one_setting_of_a_step() -> None:
    loss = GIVEN["train"]["loss"]
    changed = with_settings(TrainConfig(), {"train.loss": loss})
    assert changed.loss.args == loss["args"]
    assert with_settings(changed, {"train.loss": "cispo"}).loss.name == "cispo"
