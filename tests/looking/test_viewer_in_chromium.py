"""The viewer as a person uses it, in a real browser: filters, reads, colours, compares, and follows a run.

With ROLLMILL_SCREENSHOTS=docs its pictures are stored there.
"""

import http.server
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from playwright.sync_api import Browser, Page, Request, Route, expect, sync_playwright
from span_rows import Row, whole_step
from stored_spans import store_spans

from rollmill.tasks.look.web.request_guard import TOKEN_FILE
from rollmill.tasks.processes.launched_process import LaunchedProcess, free_port
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder, partition_folder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.shards.shard import write_shard
from rollmill.tasks.store.shards.shard_names import ShardName

pytestmark = pytest.mark.service

LONGEST_MS = 60_000
expect.set_options(timeout=LONGEST_MS)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
LINE = 10_000_000
HOSTILE = (
    "<script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>"
    "<a href='javascript:window.harmed = 1'>answer</a> [md](javascript:window.harmed=1) "
    "<think>do not look</think> \x1b[31mred\x1b[0m \u202eback\u202c \ud800 end"
)


class Blank(http.server.BaseHTTPRequestHandler):
    """An empty page of another site."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<body></body>")


Open = Callable[[str], Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def view(folder: RunFolder, log: Path) -> Iterator[str]:
    """`rollmill view` of a run; yields its address, with the token."""
    port = free_port()
    words = ["view", folder.location, "--no-browser", "--port", str(port), "--refresh-s", "0.5"]
    command = [str(Path(sys.executable).parent / "rollmill"), *words]
    process = LaunchedProcess.start("viewer", command, log=log, env={**os.environ}, stop_grace_s=2.0)
    try:
        _wait_until_it_answers(port, process)
        yield f"http://127.0.0.1:{port}/?token={TOKEN_FILE.read_text()}"
    finally:
        process.stop_now()


def _wait_until_it_answers(port: int, process: LaunchedProcess) -> None:
    deadline = time.monotonic() + LONGEST_MS / 1000
    while True:
        with socket.socket() as asking:
            if not asking.connect_ex(("127.0.0.1", port)):
                return
        assert process.is_running, process.log_tail()
        assert time.monotonic() < deadline, "the viewer does not answer"
        time.sleep(0.1)


@contextmanager
def open_pages(browser: Browser, address: str) -> Iterator[Open]:
    """Opens pages, of which no request may go elsewhere, and no script may fail or be refused."""
    origin = address.split("/?")[0]
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    context.set_default_timeout(LONGEST_MS)
    page = context.new_page()
    requested, wrong = list[str](), list[str]()
    page.on("request", lambda request: requested.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)

    def to(path: str) -> Page:
        page.goto(origin + path)
        expect(page.locator("main > *")).to_be_visible()
        return page

    try:
        page.goto(address)
        assert page.url == f"{origin}/"
        yield to
        assert [url for url in requested if not url.startswith((f"{origin}/", "data:"))] == []
        assert wrong == []
    finally:
        context.close()


def picture(page: Page, name: str) -> None:
    """Store what the page looks like, where it is asked for."""
    if folder := os.environ.get("ROLLMILL_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"viewer-{name}.png")


@pytest.fixture(scope="module")
def small(small_run: RunFolder, browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Pages of the small run."""
    log = tmp_path_factory.mktemp("viewer") / "viewer.log"
    with view(small_run, log) as address, open_pages(browser, address) as to:
        yield to


def test_a_failed_trajectory_is_found_and_read(small: Open) -> None:
    page = small("/")
    expect(page.locator(".chart .main-svg").first).to_be_visible()
    picture(page, "run")
    page.get_by_role("link", name="trajectories").click()
    expect(page.locator("#count")).to_have_text("48 trajectories")
    page.locator(".filter.status button").click()
    page.get_by_role("option", name="failed").click()
    expect(page.locator("#count")).to_have_text("1 trajectory")
    expect(page).to_have_url(re.compile(r"/trajectories\?status=failed"))
    page.keyboard.press("Escape")
    picture(page, "failed")
    page.get_by_role("link", name="5.3").click()
    expect(page.locator(".facts")).to_contain_text("RequestError: 503 from the server")
    expect(page).to_have_url(re.compile(r"/trajectory/5\.3$"))
    page.go_back()
    expect(page.locator("#count")).to_have_text("1 trajectory")
    page.reload()
    expect(page.locator("#count")).to_have_text("1 trajectory")


def test_a_condition_in_sql_selects_rows_and_a_wrong_one_is_explained(small: Open) -> None:
    page = small("/trajectories")
    condition = page.locator(".filter.where input")
    condition.fill("reward > 0.5 and step = 1")
    expect(page).to_have_url(re.compile(r"where=reward\+%3E\+0\.5\+and\+step\+%3D\+1"))
    expect(page.locator("#count")).to_have_text(re.compile(r"^[1-9]\d? trajectories$"))
    expect(page.locator(".ag-row[row-index='0'] .ag-cell[col-id=step]")).to_have_text("1")
    expect(page.locator(".ag-row[row-index='0'] .ag-cell[col-id=problem]")).not_to_have_text("")
    for wrong, said in (("rewrd > 0.5", '"rewrd" not found'), ("reward >", "something is missing")):
        condition.fill(wrong)
        expect(page.locator("#count")).to_contain_text(said)
    page.reload()
    expect(condition).to_have_value("reward >")
    condition.fill("")
    expect(page.locator("#count")).to_have_text("48 trajectories")
    page = small("/held-out")
    page.locator(".filter.where input").fill("greedy and policy_version = 3")
    expect(page.locator(".ag-row[row-index='0'] .ag-cell[col-id=trajectory]")).to_have_text("v3.0.greedy")


def test_filters_that_change_faster_than_the_server_answers_leave_the_rows_of_the_last(small: Open) -> None:
    page = small("/trajectories")
    expect(page.locator("#count")).to_have_text("48 trajectories")
    held = list[Route]()

    def asks_for_rows(request: Request) -> bool:
        return "getRowsResponse" in (request.post_data or "")

    def hold(route: Route) -> None:
        if asks_for_rows(route.request) and len(held) < 3:
            held.append(route)
        else:
            route.continue_()

    page.route("**/*", hold)
    for most in (0.1, 0.2, 0.3):
        with page.expect_request(asks_for_rows):
            page.locator(".filter.where input").fill(f"reward > {most}")
    page.locator(".filter.where input").fill("reward > 0.5 and step = 1")
    expect(page.locator(".ag-row[row-index='0'] .ag-cell[col-id=step]")).to_have_text("1")
    for route in held:
        route.continue_()
    page.unroute_all()


def test_all_rows_that_a_table_asks_for_at_once_are_shown(small: Open) -> None:
    page = small("/")

    asked = set[int]()

    def shrink(route: Route) -> None:
        answer, posted = route.fetch(), route.request.post_data or ""
        asked.update(map(int, re.findall(r'"startRow":(\d+)', posted)))
        text = re.sub(r'("cacheBlockSize": ?)100', r"\g<1>10", answer.text())
        route.fulfill(response=answer, body=text)

    page.route("**/_dash-update-component*", shrink)
    page = small("/trajectories?sort=trajectory")
    expect(page.locator("#count")).to_have_text("48 trajectories")
    names = page.locator(".ag-pinned-left-cols-container .ag-cell[col-id=trajectory]")
    assert names.count() > 20
    expect(names.get_by_text(re.compile(r"\d+\.\d+"))).to_have_count(names.count())
    assert {0, 10, 20} <= asked
    page.unroute_all()


def test_tokens_are_coloured_by_the_chosen_column_and_show_their_numbers(small: Open) -> None:
    page = small("/trajectory/5.0")
    token = page.locator("#painted span").nth(8)
    by_logprob = token.evaluate("each => each.style.background")
    page.get_by_label("advantage").check()
    expect(page).to_have_url(re.compile("by=advantage"))
    expect(token).not_to_have_css("background-color", by_logprob)
    expect(page.locator("#legend")).to_contain_text("not sampled")
    token.hover()
    for text in ("token 8", "policy version 1", "logprob -", "advantage 0.3"):
        expect(page.locator("#token-details")).to_contain_text(text)
    picture(page, "trajectory")
    page.locator("#painted").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#token-details")).to_contain_text("token 9")


def test_two_scorers_and_two_versions_are_shown_side_by_side(small: Open) -> None:
    page = small("/compare?a=addition%401&b=brevity%401")
    expect(page.locator("#count")).to_have_text("46 trajectories")
    expect(page.locator(".summary")).to_contain_text(
        "mean reward 0.540 by addition@1 and -0.118 by brevity@1"
    )
    expect(page.locator(".ag-center-cols-container .ag-row").first).to_contain_text("-1.210")
    picture(page, "scorers")
    page = small("/compare?a=v0&b=v3")
    page.get_by_role("link", name="1 greedy").click()
    expect(page.locator(".pair .facts")).to_have_count(2)
    expect(page.locator(".pair")).to_contain_text("policy version 3")


def test_a_table_is_sorted_by_its_heading_gone_through_with_keys_and_fits_a_narrow_window(
    small: Open,
) -> None:
    page = small("/groups?env=addition")
    expect(page.locator("#count")).to_have_text("6 groups")
    page.locator(".ag-header-cell[col-id=reward_mean]").click()
    expect(page).to_have_url(re.compile("sort=reward_mean"))
    page.locator(".ag-row[row-index='0'] .ag-cell[col-id=env]").click()
    page.keyboard.press("Enter")
    expect(page.locator("#count")).to_have_text("4 trajectories")
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_function("document.documentElement.scrollWidth <= window.innerWidth")
    small("/trajectory/5.0")
    page.wait_for_function("document.documentElement.scrollWidth <= window.innerWidth")
    page.set_viewport_size({"width": 1280, "height": 860})


def test_a_step_that_is_stored_meanwhile_appears_by_itself(
    small_run: RunFolder, browser: Browser, tmp_path: Path
) -> None:
    folder, aside = RunFolder(tmp_path / "run"), tmp_path / "aside"
    shutil.copytree(small_run.local, folder.local)
    kept_back = [*folder.local.glob("*/step=000002"), *folder.local.glob("scores/*/step=000002")]
    for place in kept_back:
        target = aside / place.relative_to(folder.local)
        target.parent.mkdir(parents=True, exist_ok=True)
        place.rename(target)
    with view(folder, tmp_path / "viewer.log") as address, open_pages(browser, address) as to:
        page = to("/trajectories")
        expect(page.locator("#count")).to_have_text("32 trajectories")
        for place in kept_back:
            (aside / place.relative_to(folder.local)).rename(place)
        expect(page.locator("#count")).to_have_text("48 trajectories")
        expect(page.locator(".ag-pinned-left-cols-container .ag-row").first).to_have_text("8.0")
        page = to("/")
        expect(page.locator("#steps .ag-center-cols-container .ag-row")).to_have_count(3)


def later_steps(first: int, last: int) -> Iterator[Row]:
    """Spans of further steps, each of another length; every eighth also evaluates."""
    began = 10.0 * first
    for step in range(first, last + 1):
        scale, whole_s = 0.6 + 0.08 * (7 * step % 11), 10.0 if step % 8 else 14.0
        rows = [*whole_step(step)[1:], (step, "flow", "step", "step", 0, whole_s)]
        rows += [(step, "flow", "step", "evaluate", 9.9, whole_s)] if step % 8 == 0 else []
        for row in rows:
            yield (*row[:4], began + scale * row[4], began + scale * row[5], *row[6:])
        began += scale * whole_s


def test_the_time_of_steps_is_drawn_and_listed(
    timed_run: RunFolder, browser: Browser, tmp_path: Path
) -> None:
    store_spans(timed_run, "5eed5eed5eed5eed", *later_steps(3, 30))
    with view(timed_run, tmp_path / "viewer.log") as address, open_pages(browser, address) as to:
        page = to("/")
        page.locator("#steps a[href='/time?step=1']").click()
        expect(page.locator(".timeline .ytick")).to_have_count(5)
        cell = page.get_by_role("cell", name="waiting_for_stragglers").first
        expect(cell).to_be_hidden()
        page.get_by_text("by what decided it").click()
        expect(cell).to_be_visible()
        page.get_by_role("link", name="step 2").click()
        expect(page).to_have_url(re.compile("/time.step=2$"))
        expect(page.locator(".timeline h3")).to_contain_text("timeline of step 2")
        bar = page.locator("#step-bars .bars .point").first.bounding_box()
        assert bar is not None
        middle = bar["x"] + bar["width"] / 2, bar["y"] + bar["height"] / 2
        page.mouse.move(*middle)
        expect(page.locator("#step-bars .hovertext")).to_contain_text("step 0, generating: 5.000 s, 50 %")
        page.mouse.click(*middle)
        expect(page).to_have_url(re.compile("/time.step=0$"))
        expect(page.locator(".timeline h3")).to_contain_text("timeline of step 0")
        to("/time?step=24")
        expect(page.locator(".timeline .ytick")).to_have_count(5)
        expect(page.locator("#step-bars .bars .point").first).to_be_visible()
        picture(page, "time")
        page.set_viewport_size({"width": 390, "height": 844})
        expect(page.locator("html")).to_have_js_property("scrollWidth", 390)
        to("/time")
        page.get_by_text("by what decided it").click()
        expect(cell).to_be_visible()
        store_spans(timed_run, "5eed5eed5eed5eed", *later_steps(40, 40))
        expect(page.locator(".timeline h3")).to_contain_text("timeline of step 40")
        expect(cell).to_be_visible()


@pytest.fixture
def hostile_run(small_run: RunFolder, tmp_path: Path) -> RunFolder:
    """The same run, with a trajectory that says what could do harm, and one of a single line of 10 MB."""
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(small_run.local, folder.local)
    rows = read(folder, "rollouts", step=1)
    first = rows.filter((pc.field("group") == 5) & (pc.field("sample") == 0)).to_pylist()[0]
    said = {0: HOSTILE, 1: "x" * LINE}
    made = [
        first
        | {
            "sample": sample,
            "attempt": 1,
            "trajectory_id": f"{first['run']}.5.{sample}.1",
            "messages": json.dumps([{"role": "assistant", "content": text}]),
            "status": "failed",
            "error_type": "EpisodeError",
            "error": text[:1000].encode(errors="replace").decode(),
            "env": "<b>env</b>",
        }
        for sample, text in said.items()
    ]
    batch = pa.RecordBatch.from_pylist(made, schema=rows.schema)
    write = partial(write_shard, name=ShardName(2, 0), dataset="rollouts", appended=[batch])
    open_files(folder).publish(partition_folder("rollouts", {"step": 1}), write)
    return folder


def test_what_a_model_says_is_shown_as_it_is_and_does_nothing(
    hostile_run: RunFolder, browser: Browser, tmp_path: Path
) -> None:
    with view(hostile_run, tmp_path / "viewer.log") as address, open_pages(browser, address) as to:
        page = to("/trajectories?status=failed")
        expect(page.locator("#count")).to_have_text("3 trajectories")
        expect(page.locator(".ag-center-cols-container")).to_contain_text("<script>window.harmed")
        page = to("/trajectory/5.0.1")
        text = page.locator(".conversation pre").inner_text()
        for shown in (
            "<script>window.harmed",
            "<think>do not look</think>",
            "␛[31mred",
            "<U+202E>back",
            "<U+D800>",
        ):
            assert shown in text
        assert page.locator(".conversation :is(script, img, a)").count() == 0
        picture(page, "harmless")
        page = to("/trajectory/5.1.1")
        expect(page.locator("summary")).to_contain_text("of 10,000,000 in all")
        assert len(page.locator(".conversation pre").first.inner_text()) == 20_000
        page.locator("summary").click()
        expect(page.locator(".conversation")).to_contain_text("9,500,000 more characters are in the file")
        assert page.evaluate("window.harmed") is None
        with page.expect_download() as download:
            page.get_by_role("link", name="download").click()
        assert Path(download.value.path()).stat().st_size > LINE


def test_a_link_on_a_page_of_another_site_opens_the_viewer_once_the_browser_has_its_cookie(
    small_run: RunFolder, browser: Browser, tmp_path: Path
) -> None:
    with (
        view(small_run, tmp_path / "viewer.log") as address,
        http.server.HTTPServer(("127.0.0.1", 0), Blank) as other,
    ):
        threading.Thread(target=other.serve_forever, daemon=True).start()
        page = browser.new_context().new_page()
        page.set_default_timeout(LONGEST_MS)
        target = f"{address.split('/?')[0]}/trajectory/5.0"
        # "localhost" is another site than 127.0.0.1.
        elsewhere = f"http://localhost:{other.server_port}/"
        for has_cookie in (False, True):
            page.goto(elsewhere)
            page.evaluate(
                "to => { const link = document.createElement('a'); link.href = to; document.body.append(link); link.click() }",
                target,
            )
            page.wait_for_url(target)
            shown = (
                page.locator("main > *") if has_cookie else page.get_by_text("This viewer needs its token")
            )
            expect(shown.first).to_be_visible()
            page.goto(elsewhere)
            page.evaluate("to => { location.href = to }", address)
            expect(page.locator("main > *").first).to_be_visible()
        other.shutdown()
        page.context.close()
