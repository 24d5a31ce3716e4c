"""The local Prefect server starts once, reports a taken port, is found again, and is gone after `down`."""

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import patient
import pytest

from rollmill.flows.commands import service_commands
from rollmill.flows.prefect_integration import local_server
from rollmill.tasks.errors import ConfigError, ServiceStartError
from rollmill.tasks.processes.launched_process import free_port

START = "from pathlib import Path; from rollmill.flows.prefect_integration import local_server; print(local_server.up(Path({home!r}), {port}))"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Home of a server that another process, ended by now, has started."""
    folder = tmp_path_factory.mktemp("prefect")
    script = START.format(home=str(folder), port=free_port())
    try:
        subprocess.run([sys.executable, "-c", script], check=True)
        yield folder
    finally:
        local_server.down(folder)


def start(home: Path) -> local_server.Server:
    found = local_server.status(home)
    assert found is not None
    return found


@pytest.mark.service
def test_server_outlives_the_command_that_started_it_and_its_terminal(home: Path) -> None:
    pid = start(home).pid
    assert os.getsid(pid) == pid
    assert patient.get(f"{start(home).api_url}/health").json() is True


@pytest.mark.service
def test_ui_answers_and_calls_the_api_on_its_own_port(home: Path) -> None:
    url = start(home).ui_url
    assert "<html" in patient.get(url, follow_redirects=True).text
    assert patient.get(f"{url}/ui-settings").json()["api_url"] == "/api"


@pytest.mark.service
def test_server_runs_with_the_tuned_settings(home: Path) -> None:
    settings = patient.get(f"{start(home).api_url}/admin/settings").json()
    assert settings["home"] == str(home)
    services = settings["server"]["services"]
    assert services["task_run_recorder"]["batch_size"] == 200
    assert services["event_persister"]["batch_size"] == 500
    assert settings["server"]["ui"]["show_promotional_content"] is False
    assert settings["server"]["analytics_enabled"] is False
    assert settings["server"]["events"]["retention_period"] == "P2D"


@pytest.mark.service
def test_second_up_finds_the_running_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    before = start(home)
    assert local_server.up(home, free_port()) == before.ui_url
    assert local_server.ensure(home, free_port()) == before.api_url
    assert start(home) == before


@pytest.mark.service
def test_up_at_another_port_says_which_server_runs_and_how_to_end_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    local_server.HOME.parent.mkdir()
    local_server.HOME.symlink_to(home)
    with pytest.raises(ConfigError, match=rf"runs at {start(home).ui_url}; .*rollmill down"):
        service_commands.up(port=free_port())
    service_commands.up(port=start(home).port)
    assert start(home).ui_url in capsys.readouterr().out


@pytest.mark.service
def test_prefect_api_url_is_attached_to(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", start(home).api_url)
    assert local_server.ensure(tmp_path / "never") == start(home).api_url
    assert not (tmp_path / "never").exists()


@pytest.mark.service
def test_ui_address_in_place_of_the_api_address_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", start(home).ui_url)
    with pytest.raises(ConfigError, match=r"not Prefect's API \(its address ends with /api"):
        local_server.ensure()


@pytest.mark.service
def test_down_leaves_nothing_running_and_up_starts_again(tmp_path: Path) -> None:
    local_server.up(tmp_path, free_port())
    first = start(tmp_path)
    assert local_server.down(tmp_path)
    assert not first.is_running
    assert local_server.status(tmp_path) is None
    assert not local_server.down(tmp_path)
    local_server.up(tmp_path, first.port)
    second = start(tmp_path)
    assert second.pid != first.pid
    assert local_server.down(tmp_path)


@pytest.mark.service
def test_two_folders_that_start_at_once_without_a_port_have_two_servers(tmp_path: Path) -> None:
    homes = [tmp_path / "a", tmp_path / "b"]
    scripts = [START.format(home=str(each), port=None) for each in homes]
    try:
        starts = [subprocess.Popen([sys.executable, "-c", each]) for each in scripts]
        assert [each.wait() for each in starts] == [0, 0]
        ports = {start(each).port for each in homes}
        assert len(ports) == 2
        assert ports <= set(local_server.PORTS)
    finally:
        for each in homes:
            local_server.down(each)


def test_without_a_port_the_first_free_one_is_taken() -> None:
    with local_server.listen(None) as first, local_server.listen(None) as second:
        ports = [each.getsockname()[1] for each in (first, second)]
    assert ports[0] < ports[1]
    assert set(ports) <= set(local_server.PORTS)


def test_chosen_port_that_is_taken_is_a_config_error_with_a_remedy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError,
            match=rf"port = {port}: .*leave out --port .*PREFECT_API_URL=http://127.0.0.1:{port}/api",
        ):
            local_server.up(tmp_path, port)
    assert local_server.status(tmp_path) is None


def test_home_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="run in a folder that this user may write to"):
        local_server.up(tmp_path / "file" / "home", free_port())


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(
            json.dumps({"pid": os.getpid(), "started": 1, "port": 4200}), id="pid of another process"
        ),
        pytest.param(json.dumps({"pid": 2**22 + 1, "started": 1, "port": 4200}), id="pid of no process"),
        pytest.param(
            json.dumps({"pid": 2**22 + 1, "started": 0, "port": 4200}), id="ended before it was known"
        ),
        pytest.param('{"pid": 12', id="cut off"),
        pytest.param("[]", id="not a state"),
    ],
)
def test_stale_state_file_does_no_harm(tmp_path: Path, state: str) -> None:
    (tmp_path / "server.json").write_text(state)
    assert local_server.status(tmp_path) is None
    assert not local_server.down(tmp_path)
    assert not (tmp_path / "server.json").exists()


@pytest.mark.service
def test_the_answer_of_another_folders_server_is_not_taken_for_ours(home: Path, tmp_path: Path) -> None:
    """As when two folders start their servers at the same time, and both find the port free."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as ours:
        started = int(Path(f"/proc/{ours.pid}/stat").read_text().rpartition(")")[2].split()[19])
        state = {"pid": ours.pid, "started": started, "port": start(home).port}
        (tmp_path / "server.json").write_text(json.dumps(state))
        (tmp_path / "server.log").touch()
        with pytest.raises(ServiceStartError, match="another process listens on port"):
            local_server.up(tmp_path, start_timeout_s=0.1)
    assert local_server.status(tmp_path) is None
    assert start(home).is_running


def test_down_makes_no_home(tmp_path: Path) -> None:
    assert not local_server.down(tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_server_that_ends_while_starting_is_an_error_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE", "many")
    with pytest.raises(ServiceStartError, match=r"(?s)ended while starting.*valid integer"):
        local_server.up(tmp_path, free_port())
    assert local_server.status(tmp_path) is None


def test_address_where_nobody_answers_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{free_port()}/api")
    with pytest.raises(ConfigError, match=r"PREFECT_API_URL = .*nothing answers there"):
        local_server.ensure()


def test_address_of_something_else_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.handle_request, daemon=True).start()
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{other.server_address[1]}/api")
        with pytest.raises(ConfigError, match="not Prefect's API"):
            local_server.ensure()


def test_the_environment_is_the_servers_where_it_must_be_and_the_users_elsewhere() -> None:
    ours = {
        "PREFECT_API_URL": "http://elsewhere/api",
        "PREFECT_PROFILE": "cloud",
        "PREFECT_HOME": "/elsewhere",
        "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P7D",
        "PATH": "/bin",
    }
    made = local_server.environment(Path("/state"), ours)
    assert "PREFECT_API_URL" not in made
    assert "PREFECT_PROFILE" not in made
    assert made["PREFECT_HOME"] == "/state"
    assert made["PREFECT_SERVER_EVENTS_RETENTION_PERIOD"] == "P7D"
    assert made["PATH"] == "/bin"
