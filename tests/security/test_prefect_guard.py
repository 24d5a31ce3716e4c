"""Pages of other sites in the user's browser cannot use the local Prefect server; its own pages and programs can."""

from collections.abc import Iterator
from urllib.parse import urlsplit

import patient
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from rollmill.flows.prefect_integration import local_server
from rollmill.tasks.processes.browser_requests import find_refusal
from rollmill.tasks.processes.launched_process import free_port

OTHER_SITE = "http://elsewhere.example"


@pytest.fixture(scope="module")
def ui_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("prefect")
    yield local_server.up(home, free_port())
    local_server.down(home)


@pytest.mark.service
@pytest.mark.parametrize(
    ("headers", "is_allowed"),
    [
        ({}, True),
        ({"Host": "localhost:9999"}, True),
        ({"Host": "127.0.0.1:9999", "Origin": "http://127.0.0.1:9999"}, True),
        ({"Host": "rebound.example:4200"}, False),
        ({"Host": "rebound.example:4200", "Origin": "http://rebound.example:4200"}, False),
        ({"Host": "127.0.0.1.rebound.example"}, False),
        ({"Host": "rebound.example@evil"}, False),
        ({"Origin": OTHER_SITE}, False),
        ({"Origin": "http://127.0.0.1:1"}, False),
        ({"Origin": "null"}, False),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, False),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate"}, False),
    ],
)
def test_only_own_pages_and_programs_may_call_the_api(
    ui_url: str, headers: dict[str, str], is_allowed: bool
) -> None:
    answer = patient.post(f"{ui_url}/api/deployments/filter", json={}, headers=headers)
    assert answer.status_code == (200 if is_allowed else 403)
    assert "access-control-allow-origin" not in answer.headers or is_allowed


@pytest.mark.parametrize(
    ("site", "destination", "is_allowed"),
    [
        ("cross-site", "document", True),
        ("cross-site", "iframe", False),
        ("cross-site", "object", False),
        ("same-origin", "iframe", True),
    ],
)
def test_another_site_may_link_to_a_page_and_may_not_frame_it(
    site: str, destination: str, is_allowed: bool
) -> None:
    headers = {"host": "127.0.0.1:4200", "sec-fetch-mode": "navigate"}
    asked = headers | {"sec-fetch-site": site, "sec-fetch-dest": destination}
    assert bool(find_refusal("this server", "GET", asked)) is not is_allowed


@pytest.mark.service
def test_preflight_of_another_site_is_refused(ui_url: str) -> None:
    headers = {"Origin": OTHER_SITE, "Access-Control-Request-Method": "POST"}
    answer = patient.request("OPTIONS", f"{ui_url}/api/deployments/filter", headers=headers)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.service
def test_another_site_may_link_to_the_ui(ui_url: str) -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert patient.get(ui_url, headers=headers, follow_redirects=True).status_code == 200


@pytest.mark.service
def test_another_site_opens_no_websocket(ui_url: str) -> None:
    address = f"ws://{urlsplit(ui_url).netloc}/api/events/out"
    with connect(address, origin=ui_url, subprotocols=["prefect"]) as own:  # type: ignore[list-item]
        own.ping().wait(60.0)
    with (
        pytest.raises(InvalidStatus, match="403"),
        connect(address, origin=OTHER_SITE, subprotocols=["prefect"]),  # type: ignore[list-item]
    ):
        pytest.fail("it was accepted")
