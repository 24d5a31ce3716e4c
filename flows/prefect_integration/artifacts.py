"""The artifacts of a run in Prefect's UI: its progress, a page of the run, a page of each step."""

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self
from uuid import UUID

from prefect.artifacts import acreate_markdown_artifact
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

from rollmill.flows.failure import PREFECT_ERRORS
from rollmill.flows.prefect_integration.background_requests import BackgroundRequests
from rollmill.flows.prefect_integration.flow_run import current_flow_run
from rollmill.flows.prefect_integration.page_process import PageProcess, PageRequest
from rollmill.flows.prefect_integration.progress import say
from rollmill.flows.prefect_integration.run_pages import StepPage
from rollmill.tasks.observe.config import ObserveConfig
from rollmill.tasks.store.folders import RunFolder

PERCENT = 100.0
# Largest share of the time spent on drawing the run's page, which takes longer with every step.
MOST_OF_TIME = 0.02
# Seconds at least from one drawing of the run's page to the next, whose pictures take some 2 CPU seconds.
RUN_PAGE_INTERVAL_S = 60.0


@dataclass(slots=True)
class _StepArtifact:
    """A step's page in Prefect's UI, to which the tables of where the step's time went are added later.

    Attributes:
        task_run_id: of the step's task run, which the page belongs to; None: the page belongs to the flow run.
        before, after: the page around its tables of time.
        id: of the artifact; None: Prefect has not created it.
    """

    page: StepPage
    task_run_id: UUID | None
    before: str = ""
    after: str = ""
    id: UUID | None = None


class RunArtifacts:
    """Creates and updates a run's pages and its progress in Prefect's UI, in the background; an async context manager.

    The run's page and its progress are one artifact each, which is updated; each step's page is a version of one artifact
    and belongs to the step's task run. A step ends after its page is made, and its last spans are stored with the next
    step's: then its page is updated with where its time went.

    Args:
        config: how often pages are made.
        folder: of the run.
        steps: of the run.
    """

    def __init__(self, config: ObserveConfig, folder: RunFolder, steps: int) -> None:
        self._config, self._folder, self._steps = config, folder, steps
        self._background = BackgroundRequests("the run's pages")
        self._pages = PageProcess()
        self._ids: dict[str, UUID] = {}
        self._done, self._shown = 0, -1
        self._draw_next_at = -float("inf")
        self._untimed: _StepArtifact | None = None

    async def __aenter__(self) -> Self:
        self._run_id = current_flow_run().id
        await self._background.start()
        return self

    async def __aexit__(self, _: object, error: BaseException | None, *__: object) -> None:
        async with self._pages:
            await self._background.close(self._show_progress, in_haste=error is not None)

    def begin(self, step: int) -> None:
        """Show in Prefect's UI that the steps before `step` are done."""
        self._done = step
        self._background.put(self._show_progress)

    def step_done(self, step: int, scorer: str, task_run_id: str = "") -> None:
        """Create the page of a finished step in Prefect's UI, and add to the page before where that step's time went.

        Args:
            step: the step, whose spans so far are stored.
            scorer: NAME@VERSION of its rewards; empty: the step has sampled no trajectories.
            task_run_id: of the step's task run, which gets the page; empty: the flow run gets it.
        """
        self.begin(step + 1)
        self._update_last_step()
        page = StepPage(self._folder, step, scorer, self._config.viewer_url)
        self._untimed = _StepArtifact(page, UUID(task_run_id) if task_run_id else None)
        self._background.put(partial(self._show_step, self._untimed))
        if time.monotonic() >= self._draw_next_at:
            self._draw_next_at = time.monotonic() + RUN_PAGE_INTERVAL_S
            self._background.put(self._show_run)

    def run_done(self) -> None:
        """Update the pages of the run and of its last step after the last step; all spans of its steps must be stored."""
        self._update_last_step()
        self._background.put(self._show_run)

    def _update_last_step(self) -> None:
        """Add to the page of the last step where the step's time went."""
        if self._untimed is not None:
            self._background.put(partial(self._show_time, self._untimed))
            self._untimed = None

    async def _show_progress(self, client: PrefectClient) -> None:
        if self._shown == self._done:
            return
        self._shown = self._done
        words = f"{self._done} of {self._steps} steps"
        await self._write(client, "progress", "-progress", PERCENT * self._done / self._steps, words)

    async def _show_run(self, client: PrefectClient) -> None:
        began = time.monotonic()
        (page,) = await self._pages.write(PageRequest("run", self._folder.location, self._config.viewer_url))
        # The page is drawn less often the longer it takes.
        seconds = time.monotonic() - began
        self._draw_next_at = max(self._draw_next_at, began + seconds / MOST_OF_TIME)
        await self._write(
            client,
            "markdown",
            "",
            page,
            "The run: curves, held-out rewards, its steps, where their time went",
        )

    async def _show_step(self, artifact: _StepArtifact, client: PrefectClient) -> None:
        page = artifact.page
        artifact.before, artifact.after = await self._pages.write(_request("around_time", page))
        made = ArtifactCreate(
            key=f"{_key(self._folder.name)}-step",
            type="markdown",
            description=f"Step {page.step}: what was lost, trajectories to read, where its time went",
            data="\n".join((artifact.before, page.time_placeholder(), artifact.after)),
            task_run_id=artifact.task_run_id,
            flow_run_id=self._run_id,
        )
        artifact.id = (await client.create_artifact(made)).id

    async def _show_time(self, artifact: _StepArtifact, client: PrefectClient) -> None:
        if artifact.id is None:
            return
        (tables,) = await self._pages.write(_request("time", artifact.page))
        whole = "\n".join((artifact.before, tables, artifact.after))
        await client.update_artifact(artifact.id, ArtifactUpdate(data=whole))

    async def _write(self, client: PrefectClient, kind: str, suffix: str, data: object, words: str) -> None:
        """Create the run's Prefect artifact of this kind, or update it if it exists."""
        if kind in self._ids:
            await client.update_artifact(self._ids[kind], ArtifactUpdate(data=data, description=words))
            return
        made = ArtifactCreate(
            key=f"{_key(self._folder.name)}{suffix}",
            type=kind,
            description=words,
            data=data,
            flow_run_id=self._run_id,
        )
        self._ids[kind] = (await client.create_artifact(made)).id


def _request(part: Literal["around_time", "time"], page: StepPage) -> PageRequest:
    return PageRequest(part, page.folder.location, page.viewer, page.step, page.scorer)


async def show_page(name: str, make: Callable[[], str]) -> None:
    """Create a page of Markdown, under a name; a missing Prefect server is reported and not an error."""
    try:
        await acreate_markdown_artifact(await asyncio.to_thread(make), key=_key(name))
    except PREFECT_ERRORS as error:
        say(f"Prefect did not create the page {name}: {type(error).__name__}: {error}")


def _key(name: str) -> str:
    """Return a name as the key of a Prefect artifact: lowercase letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "run"
