"""What a model said is shown by Prefect's UI as it was said, and does nothing there; in a real browser, in both UIs."""

import json
import shutil
from collections.abc import Iterator
from urllib.parse import urlsplit

import patient
import pytest
from playwright.sync_api import Page, Request, sync_playwright

from rollmill.flows.prefect_integration.run_pages import trajectory_lines
from rollmill.tasks.look.tables.notable_trajectories import NotableTrajectory
from rollmill.tasks.look.terminal.markdown_escape import JOINER, escape_inline

pytestmark = pytest.mark.service

SAID = (
    "<script>window.taken = 1</script><img src=http://evil.example/a.png onerror='window.taken = 1'>",
    "![](http://evil.example/b.png) [click](javascript:window.taken=1) <iframe src=http://evil.example/c></iframe>",
    "```\n````\n</code></pre><img src=http://evil.example/d.png onerror=window.taken=1>",
    "<think>2 + 2</think> | **4** | &lt;b&gt; $x$ <style>*{display:none}</style>",
    json.loads('"\\ud800\\u202e\\u001b[31m"'),
    "z" * 10_000_000,
)
SHOWN = (*SAID[:4], "<U+D800><U+202E>␛[31m", "z" * 400)
NAME = "</h1><img src=http://evil.example/e.png onerror=window.taken=1>![](http://evil.example/f.png)`|"
CHROMIUM = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking")
TIMEOUT_MS = 120_000


@pytest.fixture(name="browser_page", scope="module")
def _browser_page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=[*CHROMIUM])
        page = browser.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        yield page
        browser.close()


@pytest.fixture(name="artifact", scope="module")
def _artifact(prefect_api: str) -> str:
    """Return the id of a page that shows all of it."""
    row = {"reward": 1.0, "status": NAME, "env": NAME, "error_type": NAME, "error": NAME}
    reading = NotableTrajectory("best", "1.2", row, [{"role": NAME, "content": each} for each in SAID])
    lines = [f"# {escape_inline(NAME)}", "", *trajectory_lines(reading, "")]
    body = {"key": "malicious", "type": "markdown", "data": "\n".join(lines)}
    made = patient.post(f"{prefect_api}/artifacts/", json=body)
    made.raise_for_status()
    return str(made.json()["id"])


@pytest.mark.parametrize("ui", ["", "/v2"])
def test_a_malicious_completion_is_shown_as_it_is_and_does_nothing(
    browser_page: Page, prefect_api: str, artifact: str, ui: str
) -> None:
    asked: list[str] = []

    def note(request: Request) -> None:
        asked.append(urlsplit(request.url).hostname or "")

    browser_page.on("request", note)
    browser_page.goto(f"{prefect_api.removesuffix('/api')}{ui}/artifacts/artifact/{artifact}")
    browser_page.locator("pre").nth(len(SAID) - 1).wait_for()
    blocks = browser_page.locator("pre").all_inner_texts()
    for said, shown in zip(blocks[: len(SAID)], SHOWN, strict=True):
        assert shown in said.replace(JOINER, "")
    assert "characters more …]" in blocks[len(SAID) - 1]
    assert NAME in browser_page.locator("h1").filter(has_text="evil").first.inner_text()
    assert browser_page.evaluate("window.taken") is None
    assert "127.0.0.1" in asked
    assert not [host for host in asked if "evil" in host]
