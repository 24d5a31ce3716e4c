"""Bad input ends before anything is started: one message with field, value and remedy, and no traceback."""

import os
import socket
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows import cli


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the product's presets, a vLLM environment that is never used, and no server."""
    (tmp_path / "conf").symlink_to(Path(__file__).parents[2] / "conf")
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/false\n")
    python.chmod(stat.S_IRWXU)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    return tmp_path


def refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """What the command says when it refuses; checks that it is one message and the status of a wrong setting."""
    monkeypatch.setattr("sys.argv", ["rollmill", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr()
    assert end.value.code == 2
    assert said.out == ""
    assert "Traceback" not in said.err
    return said.err
