"""Secrets appear in no output and in no file that other users can read; options that open a server need a key however they are spelled."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rollmill.flows.configuration.settings import load, validate
from rollmill.flows.prefect_integration import local_server
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.score.config import EndpointConfig
from rollmill.tasks.serve.config import ServeConfig
from rollmill.tasks.serve.vllm_launch import check_guarded
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.lock import lock_run

ROOT = Path(__file__).parents[2]
TOKEN = "planted-token-of-the-trainer"


def output_of_trainer(folder: Path, token: str) -> str:
    """All that `rollmill trainer quickstart` prints until it is stopped after its first line."""
    with subprocess.Popen(
        [str(Path(sys.executable).parent / "rollmill"), "trainer", "quickstart", "--port", str(free_port())],
        cwd=folder,
        env=os.environ | {"ROLLMILL_TRAINER_TOKEN": token},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout
        first = process.stdout.readline()
        process.terminate()
        return first + process.stdout.read()


@pytest.mark.service
@pytest.mark.parametrize(("token", "is_printed"), [(TOKEN, False), ("", True)])
def test_trainer_prints_only_a_token_that_it_has_made(tmp_path: Path, token: str, is_printed: bool) -> None:
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    found = output_of_trainer(tmp_path, token)
    assert found.startswith("train.url=http://127.0.0.1:")
    assert TOKEN not in found
    assert bool(re.search(r"^ROLLMILL_TRAINER_TOKEN=\S{32}$", found, re.MULTILINE)) is is_printed


@pytest.mark.parametrize(
    "arguments",
    [
        ("--host", "0.0.0.0"),
        ("--host=::",),
        ("--hos", "0.0.0.0"),
        ("--ho=0.0.0.0",),
        ("--config", "server.yaml"),
        ("--host", "127.0.0.1", "--ho", "0.0.0.0"),
    ],
)
def test_arguments_that_open_a_server_need_a_key(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="environment variable ROLLMILL_VLLM_API_KEY") as refused:
        check_guarded(ServeConfig(extra_args=arguments), {})
    assert refused.value.field == "serve.extra_args"
    check_guarded(ServeConfig(extra_args=arguments), {"ROLLMILL_VLLM_API_KEY": "key"})


@pytest.mark.parametrize(
    "arguments",
    [
        '{"taskset": {"api_key": "planted-secret"}}',
        '{"url": "http://me:planted-secret@host", "judge_apiKey" : "planted-secret"}',
        '{"headers": {"Authorization": "planted-secret"}}',
        '{"client_secret": "planted-secret"}',
        '{"hf_token": "planted-secret"}',
        '{"openai_key": "planted-secret"}',
        '{"headers": [{"bearer": "planted-secret"}]}',
    ],
)
@pytest.mark.parametrize("field", ["rollout.environment", "score.scorer", "serve.extra_args"])
def test_a_secret_in_a_json_object_is_refused_unshown(arguments: str, field: str) -> None:
    section, name = field.split(".")
    is_plug_in = name != "extra_args"
    given = (
        {"name": "openenv", "args": json.loads(arguments)}
        if is_plug_in
        else [f"--kv-transfer-config={arguments}"]
    )
    with pytest.raises(ConfigError) as refused:
        validate({section: {name: given}})
    assert refused.value.field == field
    assert "planted-secret" not in str(refused.value)
    assert "environment variable" in str(refused.value)


@pytest.mark.parametrize(
    "override",
    [
        "score.judge.api_key=planted-secret",
        "score.judge.api_keys=planted-secret",
        "serve.urls=http://me:planted-secret@host",
        "serve.extra_args=--api-key planted-secret",
        "serve.api_key_env=planted-secret",
        "rollout.env_variables=K=planted-secret",
        "rollout.environment.args.api_key=planted-secret",
        "rollout.environment={name: openenv, args: {api_key: planted-secret}}",
        "rollout.environment_args={api_key: planted-secret}",
        "mode=https://host/a?sig=planted-secret",
    ],
)
def test_a_refused_setting_of_another_shape_shows_no_secret(override: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load("quickstart", (override,))
    assert "planted-secret" not in str(refused.value)


def test_a_key_of_digits_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        load("quickstart", ("serve.api_key=12345678901",))
    assert "12345678901" not in str(refused.value)


def test_arguments_about_secrets_are_none() -> None:
    arguments = {"api_key_var": "MY_KEY", "max_tokens": 5, "eos_token": "</s>", "api_key": "", "token": 3}
    assert RolloutConfig(environment={"name": "openenv", "args": arguments}).environment.args == arguments


@pytest.mark.parametrize("name", ["JUDGE_API_KEY", "HF_TOKEN", "ROLLMILL_JUDGE", "ROLLMILL_VLLM_API_KEY", ""])
def test_a_variable_for_an_endpoints_key_is_accepted(name: str) -> None:
    assert EndpointConfig(api_key_env=name).api_key_env == name


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "HOME", "DATABASE_PASSWORD", "AWS_SECRET_ACCESS_KEY", "PREFECT_API_KEY"),
        *("MLFLOW_TRACKING_TOKEN", "ROLLMILL_TRAINER_TOKEN"),
    ],
)
def test_no_endpoint_is_sent_another_services_secret(name: str) -> None:
    for section in ("judge", "reward_model"):
        with pytest.raises(ConfigError, match="give") as refused:
            validate({"score": {section: {"api_key_env": name}}})
        assert refused.value.field == f"score.{section}.api_key_env"


def test_other_users_can_neither_lock_a_run_nor_read_the_servers_database(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        lock_run(RunFolder(str(tmp_path / "run")), StoreConfig()).release()
        with pytest.raises(ConfigError):
            # No such port, but the server's folder is made first.
            local_server.up(tmp_path / "made" / "home", port=65536)
        (tmp_path / "found").mkdir()
        local_server.down(tmp_path / "found")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run" / "lock").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "made" / "home").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "found").stat().st_mode) == 0o700


def test_passwords_of_the_documented_command_are_readable_for_their_owner_only(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    shutil.copy(ROOT / "deploy" / "secrets.example", tmp_path / "deploy")
    (command,) = re.findall(
        r"^umask.*\n.*openssl rand.*> \.env$",
        (ROOT / "docs" / "how-to" / "cluster.md").read_text(),
        re.MULTILINE,
    )
    subprocess.run(["bash", "-c", f"umask 022\n{command}"], cwd=tmp_path, check=True)
    assert stat.S_IMODE((tmp_path / ".env").stat().st_mode) == 0o600
    assert len((tmp_path / ".env").read_text().splitlines()) == len(
        (ROOT / "deploy" / "secrets.example").read_text().splitlines()
    )
