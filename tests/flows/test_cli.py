"""Bad input ends before anything is started: one message with field, value and remedy, and no traceback."""

import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from rollmill.flows import cli


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the product's presets, a vLLM environment that is never used, and no server."""
    (tmp_path / "conf").symlink_to(Path(__file__).parents[2] / "conf")
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho \'{"vllm": "0.32.0"}\'\n')
    python.chmod(stat.S_IRWXU)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    return tmp_path


def refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """What the command says when it refuses; checks that it is one message and the status of a wrong setting."""
    monkeypatch.setattr("sys.argv", ["rollmill", *words])
    with pytest.raises(SystemExit) as end:
        cli.run_command()
    said = capsys.readouterr()
    assert end.value.code == 2
    assert said.out == ""
    assert "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["quickstart", "--set", "train.lr=-1"], ["train.lr", "-1", "greater than or equal to 0"]),
        (["quickstart", "--set", "train.lrr=1"], ["train.lrr", "did you mean train.lr?"]),
        (["quickstart", "--set", "nonsense"], ["--set", "key=value"]),
        (["quickstart", "--set", "serve.urls=[http://x"], ["--set", "not YAML"]),
        (["quickstart", "--set", "score.advantage=rank"], ["score.advantage", "mean, mean_std"]),
        (["quickstart", "--name", "../elsewhere"], ["run name", "../elsewhere", "letters, digits"]),
        (
            ["quickstart", "--set", "train.loss=ppo"],
            ["train.loss", "'ppo'", "reinforce, ppo_clip", "import path"],
        ),
        (
            [
                "quickstart",
                "--set",
                "train.normalization=fixed_length",
                "--set",
                "train.normalization_tokens=0",
            ],
            ["train.normalization_tokens", "rollout.max_completion_tokens"],
        ),
        (["quickstart+dapper"], ["preset", "dapper", "quickstart", "with +: ", "dapo"]),
        (["quickstrat"], ["preset", "quickstrat", "presets are: ", "did you mean quickstart?"]),
        (["quickstart", "--set", "evaluate.n_prompts=100000"], ["evaluate.n_prompts", "held-out problems"]),
        (
            ["quickstart", "--set", "rollout.groups_per_step=9999"],
            ["rollout.groups_per_step", "training problems"],
        ),
        (["quickstart", "--set", "rollout.environment=chess"], ["rollout.environment", "chess", "addition"]),
        (["quickstart", "--set", "score.scorer=a:B"], ["score.scorer", "a:B", "addition"]),
        (
            ["quickstart", "--set", "rollout.max_in_flight=4"],
            ["rollout.max_in_flight", "rollout.group_size is 8"],
        ),
        (
            ["quickstart", "--set", "start_model.hidden_size=100"],
            ["start_model.hidden_size", "multiple of 32"],
        ),
        (["quickstart", "--set", "start_model.steps=0"], ["model", "start_model.steps=900"]),
        (
            ["quickstart", "--set", "start_model.steps=0", "--set", "model=nowhere"],
            ["model", "nowhere", "config.json is missing"],
        ),
        (
            ["quickstart", "--set", "serve.python=nowhere/python"],
            ["serve.python", "nowhere/python", "rollmill setup"],
        ),
        (["quickstart", "--set", "store.root=/proc/runs"], ["store.root", "/proc/runs", "cannot write"]),
        (["quickstart", "--set", "store.root=conf/quickstart.yaml"], ["store.root", "cannot write"]),
        (
            ["quickstart", "--set", "train.url=http://127.0.0.1:9"],
            ["ROLLMILL_TRAINER_TOKEN", "access token of the trainer at train.url"],
        ),
        (["quickstart"], ["PREFECT_API_URL", "http://127.0.0.1:9/api"]),
    ],
)
def test_a_wrong_setting_is_refused_with_field_value_and_remedy(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    fragments: list[str],
) -> None:
    said = refusal(capsys, monkeypatch, "run", *words)
    assert all(each in said for each in fragments), said
    assert not (folder / "runs").exists()
    assert not (folder / ".rollmill").exists()


@pytest.mark.parametrize("command", ["vllm", "trainer"])
def test_a_taken_port_is_refused_by_name(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refusal(capsys, monkeypatch, command, "quickstart", "--port", str(port))
    for fragment in ("--port", str(port), "taken"):
        assert fragment in said


def test_a_missing_compiler_is_refused_with_how_to_get_one(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    said = refusal(capsys, monkeypatch, "run", "quickstart")
    assert "C++ compiler" in said
    assert "apt-get install g++" in said


def test_the_readme_has_every_command() -> None:
    table = (Path(__file__).parents[2] / "README.md").read_text()
    names = set(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]
    assert {name for name in names if f"`rollmill {name}" not in table} == set()


def test_inspect_reports_a_folder_without_a_run(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "run.json is missing" in refusal(capsys, monkeypatch, "inspect", str(folder))


@pytest.mark.parametrize(
    "module",
    [
        "rollmill.flows.commands.new_runs",
        "rollmill.flows.commands.stored_runs",
        "rollmill.flows.checks.preflight",
    ],
)
def test_prefect_is_not_imported_before_it_is_known_which_server_to_lead_it_to(module: str) -> None:
    code = f"import sys, {module}; sys.exit('prefect' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
