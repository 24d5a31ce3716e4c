"""Secrets appear in no output and in no file that other users can read; options that open a server need a key however they are spelled."""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.serve.config import ServeConfig
from rollmill.tasks.serve.vllm_launch import check_guarded

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


def test_passwords_of_the_documented_command_are_readable_for_their_owner_only(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    shutil.copy(ROOT / "deploy" / "secrets.example", tmp_path / "deploy")
    (command,) = re.findall(
        r"^umask.*\n.*openssl rand.*> \.env$", (ROOT / "docs" / "cluster.md").read_text(), re.MULTILINE
    )
    subprocess.run(["bash", "-c", f"umask 022\n{command}"], cwd=tmp_path, check=True)
    assert stat.S_IMODE((tmp_path / ".env").stat().st_mode) == 0o600
    assert len((tmp_path / ".env").read_text().splitlines()) == len(
        (ROOT / "deploy" / "secrets.example").read_text().splitlines()
    )
