"""What Prefect's UI shows of a run beside its task runs: its progress, a page of it, and a page of each step."""

import asyncio
import io
import re
import time
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


class RunArtifacts:
    """Shows a run in Prefect's UI, in the background; an async context manager.

    The run's page and its progress are one artifact each, which is written anew; each step's page is a version of one
    artifact, and belongs to the step's flow run.

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
        """Show that a step is over.

        Args:
            step: the step.
            scorer: NAME@VERSION of its rewards; empty: it has no trajectories of its own.
            flow_run_id: of the step; None: that of the run.
        """
        self.begin(step + 1)
        every = self._config.step_page_every
        if every and (step % every == 0 or step + 1 == self._steps):
            page = StepPage(self._folder, step, scorer, self._config.viewer_url)
            self._background.put(partial(self._show_step, page, flow_run_id or self._run_id))
        if time.monotonic() >= self._draw_next_at:
            self._draw_next_at = time.monotonic() + self._config.picture_every_s
            self._background.put(self._show_run)

    def run_done(self) -> None:
        """Show the run as it is at its end."""
        self._background.put(self._show_run)

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
        await self._write(client, "markdown", "", page, "The run: curves, held-out rewards, its steps")

    async def _show_step(self, page: StepPage, flow_run_id: UUID, client: PrefectClient) -> None:
        made = ArtifactCreate(
            key=f"{_key(self._folder.name)}-step",
            type="markdown",
            description=f"Step {page.step}: seconds, what was lost, trajectories to read",
            data=await asyncio.to_thread(page.markdown),
            flow_run_id=flow_run_id,
        )
        await client.create_artifact(made)

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
