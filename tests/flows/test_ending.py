"""A command that runs a flow ends soon and with the right status, also when Prefect's server is gone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollmill.flows.prefect_integration import local_server
from rollmill.flows.prefect_integration.prefect_api import QUIET_TERMINAL, SHORT_RETRIES
from rollmill.tasks.processes.launched_process import free_port

pytestmark = pytest.mark.service

FLOW = Path(__file__).with_name("hanging_flow.py")


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, 128 + signal.SIGTERM),
        pytest.param(signal.SIGINT, 128 + signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_a_signal_ends_a_run_whose_prefect_server_is_gone(tmp_path: Path, number: int, status: int) -> None:
    (tmp_path / ".tmp").mkdir()
    home = tmp_path / "prefect"
    api = f"{local_server.up(home, free_port())}/api"
    try:
        process = subprocess.Popen(
            [sys.executable, str(FLOW), str(tmp_path), "hang"],
            env=os.environ | SHORT_RETRIES | {"PREFECT_API_URL": api, "EXIT_TIMEOUT_S": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        deadline = time.monotonic() + 120
        while not (tmp_path / "hangs").exists():
            assert time.monotonic() < deadline, "the flow did not begin"
            time.sleep(0.1)
    finally:
        local_server.down(home, grace_s=0.0)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == status, output
    assert "run the same command again to resume" in output


def test_a_stopped_command_that_cannot_be_resumed_reports_it() -> None:
    lines = (
        "import asyncio",
        "from rollmill.flows.commands.flow_process import UNCHANGED, exit_in_time",
        "with exit_in_time(lambda: False, 60.0, UNCHANGED): raise asyncio.CancelledError",
    )
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 128 + signal.SIGINT
    assert "the run is unchanged" in ended.stderr
    assert "to resume" not in ended.stderr


def test_a_server_that_fails_is_an_error_with_a_remedy_unless_the_work_is_done() -> None:
    for is_done in (False, True):
        lines = (
            "import httpx",
            "from rollmill.flows.commands.flow_process import exit_in_time",
            "from rollmill.tasks.errors import RollmillError",
            "said = 'Server error 503 for url /task_runs/ - Response: ...'",
            "try:",
            f"    with exit_in_time(lambda: {is_done}, 60.0): raise httpx.HTTPStatusError(said, request=None, response=None)",
            "except RollmillError as error: print(error)",
        )
        ended = subprocess.run(
            [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60
        )
        assert ended.stdout == (
            ""
            if is_done
            else "a request to Prefect's server failed (Server error 503 for url /task_runs/): it may have ended, or be overloaded; "
            "run the same command again to resume\n"
        )
        assert ("did not record how the run ended" in ended.stderr) == is_done, ended.stderr


def test_a_thread_that_user_code_left_running_does_not_keep_the_process() -> None:
    lines = (
        "import asyncio, time",
        "from rollmill.flows.commands.flow_process import exit_in_time",
        "from rollmill.tasks.user_code.left_threads import run_to_end",
        "async def play():",
        "    sleeping = asyncio.create_task(asyncio.to_thread(time.sleep, 1000))",
        "    await asyncio.sleep(0.1)",
        "    return 'played'",
        "with exit_in_time(lambda: False, 0.5): print(run_to_end(play))",
    )
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (0, "played\n")


@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_thread_that_an_environment_left_running_does_not_keep_a_refused_command(
    tmp_path: Path, is_awaited: bool
) -> None:
    wait = "await sleeping" if is_awaited else "await asyncio.sleep(0.1); raise ValueError('planted')"
    lines = (
        "import asyncio, time",
        "from rollmill.tasks.rollout.environments.addition import Addition",
        "class Sleeps(Addition):",
        "    async def example(self, split, index):",
        "        sleeping = asyncio.create_task(asyncio.to_thread(time.sleep, 1000))",
        f"        {wait}",
    )
    (tmp_path / "planted_thread.py").write_text("\n".join(lines))
    settings = (
        "rollout.environment=planted_thread:Sleeps",
        "rollout.trajectory_timeout_s=1",
        f"store.root={tmp_path}",
    )
    words = [word for each in settings for word in ("--set", each)]
    ended = subprocess.run(
        [sys.executable, "-m", "rollmill.flows.cli", "run", "quickstart", *words],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        timeout=100,
    )
    assert ended.returncode == 2
    assert "rollout.environment = 'planted_thread:Sleeps'" in ended.stderr


def test_what_prefect_logs_of_a_dead_server_is_not_printed() -> None:
    lines = (
        "import logging, prefect",
        "from prefect.logging.configuration import setup_logging",
        "setup_logging()",
        "logging.getLogger('prefect._internal.concurrency').error('an event that was not sent')",
    )
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env=os.environ | QUIET_TERMINAL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert "an event that was not sent" not in ended.stdout + ended.stderr
