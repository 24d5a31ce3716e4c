"""The product as people meet it: docs/tutorials/tutorial.md, step by step, in a real browser, and a run that is cancelled there.

Prefect has two UIs. All addresses that Rollmill prints lead to the newer one, in which nearly all of this is done.

`ROLLMILL_SCREENSHOTS=docs pytest tests/flows/test_product.py` stores what the browser shows as docs/product-*.png.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import patient
import pytest
from marked_processes import find_marked_processes
from playwright.sync_api import Browser, Locator, Page, sync_playwright
from playwright.sync_api import TimeoutError as PageTimeoutError

from rollmill.tasks.look.web.request_guard import TOKEN_FILE
from rollmill.tasks.processes.launched_process import free_port
from tests.documentation.page_commands import find_command

pytestmark = pytest.mark.service
ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run")  # fmt: skip
PICTURES = os.environ.get("ROLLMILL_SCREENSHOTS", "")
PATIENCE_MS = 120_000
CLICKS, CLICK_MS = 3, 40_000
LONGEST_RUN_MS = 1_200_000
CANCEL_MS = 120_000
PICTURE = "img[src^='data:image/']"
OLDER_UI = "/dashboard"
TERMINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
SCHEDULED = {"flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}}}
TUTORIAL = (ROOT / "docs" / "tutorials" / "tutorial.md").read_text()


def fences(language: str) -> list[str]:
    """Those of the tutorial, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", TUTORIAL, re.DOTALL | re.MULTILINE)


def fence_after(words: str) -> str:
    """The tutorial's first fence after these words, which are there once."""
    assert TUTORIAL.count(words) == 1, words
    return re.findall(r"^```\w+\n(.*?)^```", TUTORIAL.partition(words)[2], re.DOTALL | re.MULTILINE)[0]


def words_of(command: str) -> list[str]:
    """The words of a command, as a shell would part them; the product has the API's address in its environment."""
    return [word for word in shlex.split(command) if not word.startswith("PREFECT_API_URL=")]


class Product:
    """A folder as a fresh clone has it, its Prefect server, its worker and a browser."""

    def __init__(self, folder: Path, page: Page) -> None:
        self.folder, self.page = folder, page
        self.marker = f"product-{folder.name}-{os.getpid()}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        self.environment = kept | {"WORKPLACE": self.marker, "SPT_NOENV": "1"}

    def command(self, *words: str) -> str:
        """Run a command of the environment's; its output."""
        called = [str(TOOLS / words[0]), *words[1:]]
        done = subprocess.run(
            called,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(TOOLS / words[0]), *words[1:]],
            cwd=self.folder,
            env=self.environment,
            stdout=(self.folder / f"{words[0]}.log").open("w"),
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def processes(self) -> dict[int, str]:
        """Command line of every living process that was started from here, by process id."""
        return find_marked_processes(self.marker)

    def api(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """What Prefect's API answers."""
        address = self.environment["PREFECT_API_URL"] + path
        answer = patient.request(method, address, json=body)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def wait_until_ended(self, flow_run: str) -> None:
        """Wait for the end of a flow run."""
        deadline = time.monotonic() + LONGEST_RUN_MS / 1000
        while self.api("GET", f"/flow_runs/{flow_run}")["state"]["type"] not in TERMINAL:
            assert time.monotonic() < deadline, "the run did not end in time"
            time.sleep(1)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No run begins meanwhile, and those that would have are deleted."""
        self.api("PATCH", "/work_pools/rollmill", {"is_paused": True})
        try:
            yield
        finally:
            for each in self.api("POST", "/flow_runs/filter", SCHEDULED):
                self.api("DELETE", f"/flow_runs/{each['id']}")
            self.api("PATCH", "/work_pools/rollmill", {"is_paused": False})

    def picture(self, name: str) -> None:
        """Store what the browser shows, when that is asked for."""
        if PICTURES:
            self.page.screenshot(path=ROOT / PICTURES / f"product-{name}.png")

    def field(self, label: str) -> Locator:
        """The first input of the run form below a label, in either UI."""
        words = re.compile(f"^{label}\\b", re.IGNORECASE)
        heading = self.page.locator(".schema-form-property__label, label", has_text=words)
        return heading.first.locator("xpath=following::*[self::input or self::textarea][1]")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = shutil.which("chromium")
        assert found, "there is no chromium: `make test` installs it"
        browser = playwright.chromium.launch(executable_path=found, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Product]:
    """`make deploy` and a worker, in a copy of what a clone has."""
    folder = tmp_path_factory.mktemp("product")
    shutil.copytree(ROOT / "conf", folder / "conf")
    for name in (".venv", ".venv-vllm"):
        (folder / name).symlink_to(TOOLS.parent.parent / name)
    for name in ("sorting.py", "rewards.py"):
        (folder / name).write_text(fence_after(f"`{name}`:\n"))
    (folder / "conf" / "sorting.yaml").write_text(fence_after("as `conf/sorting.yaml`"))
    deployments = (ROOT / "prefect.yaml").read_text() + fence_after("at the end of `prefect.yaml`:")
    (folder / "prefect.yaml").write_text(deployments)

    page = browser.new_page(viewport={"width": 1280, "height": 860})
    page.set_default_timeout(PATIENCE_MS)
    place = Product(folder, page)
    port = free_port()
    worker = None
    try:
        place.command(*words_of(find_command(__file__, "rollmill up")), "--port", str(port))
        place.command(*words_of(find_command(__file__, "rollmill deploy")))
        place.environment["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
        worker = place.start(*words_of(find_command(__file__, "worker start")))
        yield place
    finally:
        if worker:
            worker.terminate()
            worker.wait(120)
        place.command("rollmill", "down")
    assert not place.processes(), "a process was left behind"


def wait_for_port(port: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while True:
        with socket.socket() as asking:
            if not asking.connect_ex(("127.0.0.1", port)):
                return
        assert process.poll() is None, "it ended"
        assert time.monotonic() < deadline, "nothing answers"
        time.sleep(0.1)


def open_form(product: Product, entry: str = "") -> None:
    """By the way that a person takes from where a UI begins; what the form is filled in with is the preset's."""
    page = product.page
    page.goto(product.environment["PREFECT_API_URL"].removesuffix("/api") + entry)
    page.get_by_text("Deployments", exact=True).first.click()
    # A page of the list has ten.
    page.get_by_placeholder(re.compile("^Search deployments")).fill("sorting")
    page.locator("a[href*='/deployment/']", has_text=re.compile(r"^\s*sorting\s*$")).first.click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    product.field("steps").wait_for()
    assert product.field("run_name").input_value() == "sorting"
    assert product.field("steps").input_value() == "20"


def submit(product: Product, steps: str) -> None:
    """Send the form with so many steps."""
    product.field("steps").fill(steps)
    product.page.get_by_role("button", name="Submit").click()


def submit_form(product: Product, steps: str) -> None:
    """Submit the form; click again if the browser sends no request, as when the page is being redrawn, or the server is busy (503)."""
    page = product.page
    for _ in range(CLICKS):
        with suppress(PageTimeoutError):
            with page.expect_request(re.compile("/create_flow_run$"), timeout=CLICK_MS) as asked:
                submit(product, steps)
            answer = asked.value.response()
            assert answer, "Prefect's server did not answer"
            if answer.status != HTTPStatus.SERVICE_UNAVAILABLE:
                break
    else:
        pytest.fail(f"the form was not sent; the page shows: {page.inner_text('body')}")
    assert answer.ok, answer.text()
    page.wait_for_url(lambda address: not urlsplit(address).path.endswith("/run"))


def submit_refused(product: Product, steps: str, sign: Locator) -> None:
    """Send the form, again where the page took no click, until it shows by a sign that it refuses."""
    for _ in range(CLICKS):
        submit(product, steps)
        with suppress(PageTimeoutError):
            sign.wait_for(timeout=CLICK_MS)
            break
    else:
        pytest.fail(f"nothing was refused; the page shows: {product.page.inner_text('body')}")
    assert not product.api("POST", "/flow_runs/filter", SCHEDULED)


def choose(page: Page, entry: str, confirmation: str) -> None:
    """What a person does in the menu of a run's page, in the newer UI."""
    page.get_by_role("button", name="Open menu").click()
    page.get_by_role("menuitem", name=entry).click()
    page.get_by_role("button", name=confirmation, exact=True).click()


def reopen(page: Page) -> None:
    """The page of a run as who comes later finds it, without toasts."""
    page.reload()
    page.get_by_text("starting the trainer").first.wait_for()
    page.wait_for_load_state("networkidle")


@pytest.fixture(scope="module")
def run(product: Product) -> str:
    """A run of two steps, submitted by the form; the address of its page."""
    page = product.page
    open_form(product)
    product.picture("form")
    submit_form(product, steps="2")
    page.locator("a[href*='/flow-run/']").first.click()
    page.wait_for_url(re.compile("/v2/runs/flow-run/"))
    page.get_by_text("starting the trainer").first.wait_for(timeout=LONGEST_RUN_MS)
    address = page.url
    # The page draws a running run all the time, which takes as much CPU time as the run.
    page.goto("about:blank")
    product.wait_until_ended(address.rpartition("/")[2])
    page.goto(address)
    page.get_by_text("Completed", exact=True).first.wait_for()
    reopen(page)
    product.picture("run")
    return address


def test_a_run_from_the_form_has_the_steps_that_were_filled_in(product: Product, run: str) -> None:
    shown = json.loads(product.command("rollmill", "inspect", "sorting", "--json"))
    assert [row["step"] for row in shown["by_step"]] == [0, 1]


def test_the_form_refuses_a_number_out_of_range_at_its_field(product: Product) -> None:
    with product.paused():
        open_form(product)
        submit_refused(product, "0", product.field("steps").and_(product.page.locator(":focus:invalid")))


def test_the_form_of_the_older_ui_refuses_it_too_and_makes_a_run(product: Product) -> None:
    with product.paused():
        open_form(product, OLDER_UI)
        submit_refused(product, "0", product.page.get_by_text("0 is less than the minimum of 1").first)
        submit_form(product, steps="2")
        (made,) = product.api("POST", "/flow_runs/filter", SCHEDULED)
    assert made["parameters"]["run_name"] == "sorting"
    assert made["parameters"]["config"]["steps"] == 2


def test_the_form_has_a_field_for_each_argument_of_an_environment(product: Product) -> None:
    page = product.page
    with product.paused():
        open_form(product)
        page.get_by_role("tab", name="openenv").first.click()
        product.field("url").fill("http://host:9")
        product.field("held_out").fill("7")
        submit_form(product, steps="2")
        (made,) = product.api("POST", "/flow_runs/filter", SCHEDULED)
    given = {"name": "openenv", "args": {"url": "http://host:9", "held_out": 7}}
    assert made["parameters"]["config"]["rollout"]["environment"] == given


def test_the_artifact_of_a_run_shows_the_plot(product: Product, run: str) -> None:
    page = product.page
    page.goto(run)
    page.get_by_role("tab", name="Artifacts").click()
    page.locator("a[href$='/artifacts/key/sorting']").click()
    page.locator("a[href*='/artifacts/artifact/']").click()
    page.locator(PICTURE).wait_for()
    assert page.locator(PICTURE).evaluate("picture => picture.naturalWidth") > 400
    product.picture("artifact")


def test_everything_that_the_tutorial_shows_exists(product: Product, run: str) -> None:
    for command in (
        find_command(__file__, "rollmill inspect sorting"),
        find_command(__file__, "--trajectories"),
        find_command(__file__, "rollmill show"),
        find_command(__file__, "rollmill rescore"),
    ):
        product.command(*words_of(command))
    failed = words_of(find_command(__file__, "--status failed"))
    product.command(*failed)
    assert "ConnectionError" in product.command(*failed, "--json")
    done = subprocess.run(
        [sys.executable, "-c", fence_after("Polars, DuckDB and pyarrow read them:")],
        cwd=product.folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "attempts" in done.stdout, done.stderr


def test_the_viewer_filters_to_failed_trajectories_and_shows_one(product: Product, run: str) -> None:
    page, port = product.page, free_port()
    viewer = product.start(
        *words_of(find_command(__file__, "rollmill view")), "--no-browser", "--port", str(port)
    )
    try:
        wait_for_port(port, viewer)
        token = (product.folder / TOKEN_FILE).read_text()
        page.goto(f"http://127.0.0.1:{port}/?token={token}")
        page.get_by_role("link", name="trajectories").click()
        page.locator(".filter.status button").click()
        page.get_by_role("option", name="failed").click()
        page.wait_for_url(re.compile("status=failed"))
        page.keyboard.press("Escape")
        page.get_by_role("link", name=re.compile(r"^\d+\.\d+$")).first.wait_for()
        product.picture("viewer")
        page.get_by_role("link", name=re.compile(r"^\d+\.\d+$")).first.click()
        page.wait_for_url(re.compile(r"/trajectory/\d+\.\d+"))
        page.get_by_text("ConnectionError: the sandbox of this attempt is gone").first.wait_for()
    finally:
        viewer.terminate()
        viewer.wait(120)


def test_the_scorers_can_be_tried_without_a_model(product: Product) -> None:
    snippet = fence_after("You can try both without a model:")
    subprocess.run([sys.executable, "-c", snippet], cwd=product.folder, check=True)


def test_a_run_that_is_cancelled_at_its_page_leaves_no_process_and_can_be_retried(
    product: Product, run: str
) -> None:
    page = product.page
    before = product.processes().keys()
    said = product.command(*words_of(find_command(__file__, "--deployment")))
    link = re.findall(r"http://\S+/flow-run/\S+", said)[0]
    page.goto(link)
    page.get_by_text("starting the trainer").first.wait_for(timeout=LONGEST_RUN_MS)
    choose(page, "Cancel", confirmation="Cancel Flow Run")
    page.get_by_text("Cancelled", exact=True).first.wait_for(timeout=CANCEL_MS)
    deadline = time.monotonic() + CANCEL_MS / 1000
    while left := product.processes().keys() - before:
        assert time.monotonic() < deadline, [product.processes().get(each) for each in left]
        time.sleep(0.2)
    reopen(page)
    product.command("rollmill", "verify", "sorting")
    with product.paused():
        choose(page, "Retry", confirmation="Retry")
        page.get_by_text(re.compile("^(AwaitingRetry|Late)$")).first.wait_for()
