"""What Prefect's UI shows of a run beside its task runs: its progress, a page of it, and a page of each step."""

import asyncio
import io
import re
import time
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self
from uuid import UUID

from prefect.artifacts import acreate_markdown_artifact
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

from flows.failure import PREFECT_ERRORS
from flows.looking.curves import read_curves
from flows.ui.background import Background
from flows.ui.belonging import run_flow_run
from flows.ui.pages import StepPage, run_page, scores_page
from flows.ui.progress import say
from tasks.observe.config import ObserveConfig
from tasks.store.layout import RunFolder

PICTURE_DPI = 80
"""A picture of some 60 kB."""
PERCENT = 100.0
MOST_OF_TIME = 0.02
"""Share of the time that the run's page may be in the making, which takes the longer the more steps there are."""


@dataclass(slots=True)
class _StepArtifact:
    """The page of a step in Prefect, which is told the step's time later.

    Attributes:
        flow_run_id: to which it belongs.
        before, after: the page around the tables of the step's time.
        id: of the artifact; None: Prefect has not taken it.
    """

    page: StepPage
    flow_run_id: UUID
    before: str = ""
    after: str = ""
    id: UUID | None = None


class RunArtifacts:
    """Shows a run in Prefect's UI, in the background; an async context manager.

    The run's page and its progress are one artifact each, which is written anew; each step's page is a version of one
    artifact, and belongs to the step's flow run. A step ends after its page is made, and its last spans are stored with the
    next step's: then its page is written anew, with where its time went.

    Args:
        config: how often pages are made.
        folder: of the run.
        steps: of the run.
    """

    def __init__(self, config: ObserveConfig, folder: RunFolder, steps: int) -> None:
        self._config, self._folder, self._steps = config, folder, steps
        self._background = Background(config, "the run's pages")
        self._ids: dict[str, UUID] = {}
        self._done, self._shown = 0, -1
        self._draw_next_at = -float("inf")
        self._untimed: _StepArtifact | None = None

    async def __aenter__(self) -> Self:
        self._run_id = run_flow_run().id
        await self._background.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._background.close(self._show_progress, in_haste=error is not None)

    def begin(self, step: int) -> None:
        """Show that the run stands at this step."""
        self._done = step
        self._background.put(self._show_progress)

    def step_done(self, step: int, scorer: str, flow_run_id: UUID | None = None) -> None:
        """Show what a step has done, and where the time of the one before went.

        Args:
            step: the step, whose spans so far are stored.
            scorer: NAME@VERSION of its rewards; empty: it has no trajectories of its own.
            flow_run_id: of the step; None: that of the run.
        """
        self.begin(step + 1)
        self._put_time()
        every = self._config.step_page_every
        if every and (step % every == 0 or step + 1 == self._steps):
            page = StepPage(self._folder, step, scorer, self._config.viewer_url)
            self._untimed = _StepArtifact(page, flow_run_id or self._run_id)
            self._background.put(partial(self._show_step, self._untimed))
        if time.monotonic() >= self._draw_next_at:
            self._draw_next_at = time.monotonic() + self._config.picture_every_s
            self._background.put(self._show_run)

    def run_done(self) -> None:
        """Show the run as it is at its end, when all spans of its steps are stored."""
        self._put_time()
        self._background.put(self._show_run)

    def _put_time(self) -> None:
        """Have the last page that was made written anew, with where the step's time went."""
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
        page = await asyncio.to_thread(self._run_page)
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
        artifact.before, artifact.after = await asyncio.to_thread(page.around_time)
        made = ArtifactCreate(
            key=f"{_key(self._folder.name)}-step",
            type="markdown",
            description=f"Step {page.step}: what was lost, trajectories to read, where its time went",
            data="\n".join((artifact.before, page.time_to_come(), artifact.after)),
            flow_run_id=artifact.flow_run_id,
        )
        artifact.id = (await client.create_artifact(made)).id

    async def _show_time(self, artifact: _StepArtifact, client: PrefectClient) -> None:
        if artifact.id is None:
            return
        tables = await asyncio.to_thread(artifact.page.time)
        whole = "\n".join((artifact.before, tables, artifact.after))
        await client.update_artifact(artifact.id, ArtifactUpdate(data=whole))

    async def _write(self, client: PrefectClient, kind: str, suffix: str, data: object, words: str) -> None:
        """Make an artifact of the run's flow run, or write it anew."""
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

    def _run_page(self) -> str:
        from flows.looking.plot import (
            draw,
        )  # a quarter of all that a flow imports, and its worker imports it again to cancel

        picture = io.BytesIO()
        draw(self._folder.name, read_curves(self._folder)).savefig(picture, dpi=PICTURE_DPI, format="png")
        return run_page(self._folder, picture.getvalue(), self._config.viewer_url)


async def show_scores(folder: RunFolder) -> None:
    """A page with what each scorer said of a run; a Prefect server that is gone fails nothing."""
    try:
        page = await asyncio.to_thread(scores_page, folder)
        await acreate_markdown_artifact(page, key=f"{_key(folder.name)}-scores")
    except PREFECT_ERRORS as error:
        say(f"Prefect did not take the page of scores: {type(error).__name__}: {error}")


def _key(name: str) -> str:
    """A name as Prefect allows it: lowercase letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "run"
