"""The site that `make docs` builds: without a warning, and with a search that needs nothing from elsewhere."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
LONGEST_MS = 30_000.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, check=False, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    return folder


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """Where the site is served, as by `make docs`."""
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(site))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    assert "quickstart" in (site / "search" / "search_index.json").read_text()
    pages = "".join(page.read_text() for page in site.rglob("*.html"))
    assert re.findall(r"<(?:script|link)[^>]+(?:src|href)=\"https?://[^\"]+\"[^>]*>", pages) == []


def test_the_search_finds_a_metric_in_a_browser_and_asks_no_other_server(address: str) -> None:
    asked: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        page.locator("input.md-search__input").click()
        page.keyboard.type("parity_alarms")
        link = page.locator("a.md-search-result__link[href*='how-to/operations']").first
        link.wait_for(timeout=LONGEST_MS)
        link.click()
        page.wait_for_url("**/how-to/operations/**", timeout=LONGEST_MS)
        browser.close()
    assert [url for url in asked if not url.startswith(address)] == []
