"""The viewer answers only who has the token of its printed address; other users of the machine do not."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest
from flask.testing import FlaskClient

from rollmill.tasks.look.web.app import make_app
from rollmill.tasks.look.web.request_guard import CALLBACKS, read_token, write_first_page
from rollmill.tasks.look.web.run_data import RunData
from rollmill.tasks.store.folders import RunFolder

HOST = "http://127.0.0.1:4300"
OURS = "the-token"


@pytest.fixture(name="client")
def _client(tmp_path: Path) -> FlaskClient:
    def no_tokenizer(*_: object) -> None:
        raise AssertionError("no page of this test shows tokens")

    source = RunData(RunFolder(str(tmp_path)), 0.0, no_tokenizer)
    return make_app(source, OURS, 1.0).server.test_client()


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/trajectories",
        "/download/trajectory/0.0.json",
        "/_dash-layout",
        "/_dash-dependencies",
        "/nosuch",
    ],
)
@pytest.mark.parametrize(
    "query", ["", "?token=", "?token=the-tokem", "?token=%ED%A0%80", "?token=the-token%00"]
)
def test_without_the_token_no_address_answers(client: FlaskClient, path: str, query: str) -> None:
    answer = client.get(f"{path}{query}", base_url=HOST)
    assert answer.status_code == 403
    assert "address that <code>rollmill view</code> printed" in answer.text
    assert "Set-Cookie" not in answer.headers


def test_without_the_token_no_callback_answers(client: FlaskClient) -> None:
    assert client.post(CALLBACKS, json={}, base_url=HOST).status_code == 403


def test_the_token_is_exchanged_for_a_cookie_and_leaves_the_address(client: FlaskClient) -> None:
    answer = client.get(f"/trajectories?status=failed&token={OURS}&text=a%26b", base_url=HOST)
    assert answer.status_code == 303
    assert answer.headers["Location"] == f"{HOST}/trajectories?status=failed&text=a%26b"
    given = answer.headers["Set-Cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {part.strip() for part in given.split(";")}
    assert client.get("/", base_url=HOST).status_code == 200
    name = given.split("=")[0]
    client.set_cookie(name, "other", domain="127.0.0.1")
    assert client.get("/", base_url=HOST).status_code == 403


def test_viewers_of_two_folders_keep_their_cookies_in_one_browser(
    client: FlaskClient, tmp_path: Path
) -> None:
    other = make_app(
        RunData(RunFolder(str(tmp_path)), 0.0, lambda _: None), "another", 1.0
    ).server.test_client()
    names = [
        each.get(f"/?token={token}", base_url=HOST).headers["Set-Cookie"].split("=")[0]
        for each, token in ((client, OURS), (other, "another"))
    ]
    assert names[0] != names[1]


@pytest.mark.parametrize("path", ["//evil.example/", "/%2f%2fevil.example/", "/\\evil.example"])
def test_the_address_with_the_token_leads_nowhere_else(client: FlaskClient, path: str) -> None:
    answer = client.get(f"{HOST}{path}?token={OURS}")
    assert answer.status_code == 303
    assert urlsplit(answer.headers["Location"]).netloc == urlsplit(HOST).netloc


def test_only_a_link_of_another_site_is_requested_once_more(client: FlaskClient) -> None:
    def is_repeated(site: str) -> bool:
        headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate"}
        return 'http-equiv="refresh"' in client.get("/", headers=headers, base_url=HOST).text

    assert is_repeated("cross-site")
    assert is_repeated("same-site")
    assert not is_repeated("same-origin")
    assert not is_repeated("none")


def test_the_token_is_kept_for_this_user_alone_and_stays_the_same(tmp_path: Path) -> None:
    file = tmp_path / "view" / "token"
    token = read_token(file)
    assert len(token) >= 40
    assert (file.parent.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    assert read_token(file) == token
    assert [each.name for each in file.parent.iterdir()] == ["token"]


def test_a_token_that_others_could_read_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "view" / "token"
    token = read_token(file)
    file.chmod(0o644)
    assert read_token(file) != token
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_page_that_a_browser_is_started_with_is_for_this_user_alone(tmp_path: Path) -> None:
    page = tmp_path / "open.html"
    assert OURS not in write_first_page(page, f"{HOST}/?token={OURS}")
    assert page.stat().st_mode & 0o777 == 0o600
    assert f"{HOST}/?token={OURS}" in page.read_text()
