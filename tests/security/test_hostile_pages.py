"""Text and settings from others put no HTML, image or foreign link into pages, and malformed requests are refused in one line."""

import re
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from rollmill.flows.configuration.settings import validate
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.view import Column, View
from rollmill.tasks.look.terminal.markdown_escape import make_table
from rollmill.tasks.look.web.app import make_app
from rollmill.tasks.look.web.request_guard import CALLBACKS
from rollmill.tasks.look.web.run_data import RunData
from rollmill.tasks.store.folders import RunFolder

PORT = 4300
OURS = "the-token"


@pytest.mark.parametrize(
    "text",
    [
        "<img src=x onerror=alert(1)>",
        "![p](http://evil.example/x.png)",
        "[link](http://evil.example)",
        "` | <b>",
        "a\n# b",
    ],
)
def test_a_table_shows_text_of_others_as_text(text: str) -> None:
    view = View({}, "", [Column("span"), Column("share")], [{"span": text, "share": -0.5}])
    heading, rule, row = make_table(view)
    assert (heading, rule) == ("| span | share |", "| --- | --- |")
    assert row.endswith(" | -0.500 |")
    shown = row.removeprefix("| ").removesuffix(" | -0.500 |")
    assert not re.search(r"(?<!\\)[<>\[\]()!`|#]", shown)
    assert re.sub(r"\\(.)", r"\1", shown) == " ".join(text.split())


@pytest.mark.parametrize(
    "address",
    [
        "javascript:alert(1)",
        "http://x) [evil](http://evil",
        "http://x y",
        "http://x\n# y",
        "http://x/<img>",
        "//host",
        "host:4300",
    ],
)
def test_pages_link_to_no_address_that_is_not_one(address: str) -> None:
    with pytest.raises(ConfigError, match=r"http://host:port") as refused:
        validate({"observe": {"viewer_url": address}})
    assert refused.value.field == "observe.viewer_url"


@pytest.fixture(name="client")
def _client(tmp_path: Path) -> FlaskClient:
    def no_tokenizer(*_: object) -> None:
        raise AssertionError("no page of this test shows tokens")

    source = RunData(RunFolder(str(tmp_path)), 0.0, no_tokenizer)
    client = make_app(source, OURS, 1.0).server.test_client()
    client.get(f"/?token={OURS}", base_url=f"http://127.0.0.1:{PORT}/")
    return client


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[",
        "[]",
        "{}",
        '"x"',
        '{"output": "nosuch.data", "inputs": []}',
        '{"output": "..page.children...shown.data..", "inputs": 5}',
        '{"output": "..page.children...shown.data..", "outputs": [], "changedPropIds": [], "inputs": [{"id": "url", '
        '"property": "pathname", "value": "\\u001b[31m"}]}',
    ],
)
def test_a_malformed_callback_is_refused_in_one_line(
    client: FlaskClient, capsys: pytest.CaptureFixture[str], body: str
) -> None:
    answer = client.post(
        CALLBACKS, data=body, content_type="application/json", base_url=f"http://127.0.0.1:{PORT}/"
    )
    assert answer.status_code == 400
    said = capsys.readouterr()
    assert len((said.out + said.err).splitlines()) <= 1
    assert len(answer.text.splitlines()) <= 5
