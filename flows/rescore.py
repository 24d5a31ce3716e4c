"""Scores anew what was generated before: a scorer over stored rollouts, into a scores data set of its own."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from prefect import flow
from rich.console import Console
from rich.table import Table

from flows.checks.preflight import check_store
from flows.config import RescoreConfig
from flows.failure import one_error
from flows.running.folder import RunName, check_run, run_folder
from flows.running.unscored import Unscored, check_rescoring, standing, steps_to_score, unscored_groups
from flows.ui.artifacts import show_scores
from flows.ui.cancelling import mark_cancelled
from flows.ui.progress import CountProgress, quiet_task_runs, say
from flows.ui.recording import Recording
from flows.ui.terminating import ended_in_order
from flows.ui.turns import ScoredInTurn, Turns
from tasks.errors import FailedScoresError
from tasks.rollout.group import parts_of
from tasks.score.rescoring import GroupsPart
from tasks.score.scoring import Scoring
from tasks.score.task import score
from tasks.store.layout import RunFolder
from tasks.store.rows import Rows, values
from tasks.store.run import OpenRun
from tasks.store.totals import score_totals


@flow(name="rescore", flow_run_name="{run_name}", persist_result=False, on_cancellation=[mark_cancelled])
async def rescore(run_name: RunName, config: RescoreConfig) -> str:
    """Score the stored rollouts of a run, finished or not; what the scorer has scored already is kept.

    Args:
        run_name: folder of the run below `store.root`.
        config: all settings.

    Returns:
        NAME@VERSION, by which the scores are stored.
    """
    folder = run_folder(run_name, config)
    await asyncio.to_thread(check_store, config.store.root)
    check_run(folder)
    check_rescoring(folder, config)
    with ended_in_order(), one_error():
        async with open_rescoring(folder, config) as rescoring:
            await rescoring.finish()
    await show_scores(folder)
    Console().print(await asyncio.to_thread(scores_table, folder))
    return rescoring.scorer


class Rescoring:
    """One scorer over one run, which is open for writing."""

    def __init__(self, store: OpenRun, config: RescoreConfig, scoring: Scoring) -> None:
        self.scorer = scoring.key
        self._store, self._config, self._scoring = store, config, scoring
        self._recording, self._turns = Recording(config.observe), Turns()
        self._in_flight = asyncio.Semaphore(config.tasks_in_flight)
        self._n_scores, self._n_failed, self._first_error = 0, 0, ""

    async def finish(self) -> None:
        """Score whatever has no score yet, step by step, parts of several groups at a time.

        Raises:
            FailedScoresError: more scores failed than the share allows, those that were stored before included.
        """
        steps = await asyncio.to_thread(steps_to_score, self._store.folder, self._config, self._scoring)
        left = [step for step in steps if step.n_trajectories]
        total = sum(step.n_trajectories for step in left)
        self._n_scores = total + sum(step.n_scored for step in steps)
        self._n_failed = sum(step.n_failed for step in steps)
        self._first_error = next((step.first_error for step in steps if step.n_failed), "")
        self._check()
        if not total:
            numbers = [step.step for step in steps]
            which = f"stored trajectory of steps {min(numbers)} to {max(numbers)}"
            say(f"scores/scorer={self.scorer} is complete: every {which} has its score")
            return
        with CountProgress(f"{self.scorer}", total) as self._progress:
            async with asyncio.TaskGroup() as scoring:
                for step in left:
                    await self._make_way(step)
                    groups = await asyncio.to_thread(
                        unscored_groups, self._store.folder, self._config, self._scoring, step
                    )
                    for part in parts_of(groups, self._config.groups_per_task):
                        await self._in_flight.acquire()
                        scoring.create_task(self._score(step, part))
        if self._n_failed:
            say(
                f"{self._n_failed} of {self._n_scores} scores failed and are kept as such; the first: {self._first_error}"
            )
        await self._recording.wait_until_recorded()

    async def _make_way(self, step: Unscored) -> None:
        """Leave out the scores of a step that are given anew."""
        stay, n_stale = await asyncio.to_thread(
            standing, self._store.folder, self._config, self._scoring, step
        )
        if n_stale:
            await self._store.writer.replace(step.scores, stay, scorer=self.scorer, step=step.step)

    def _check(self) -> None:
        if self._n_failed <= self._config.max_failed_share * self._n_scores:
            return
        raise FailedScoresError(
            f"{self._n_failed} of {self._n_scores} scores by {self.scorer} failed, max_failed_share allows "
            f"{self._config.max_failed_share:g}; the first: {self._first_error}\nwhat is stored stays: mend the cause and "
            "give --redo-failed, or raise the share to go on"
        )

    async def _score(self, step: Unscored, groups: Sequence[Rows]) -> None:
        """Score a part in a task run of its own."""
        try:
            await self._recording.hold_back()
            await self._turns.next()
            self._recording.started()

            async def keep(rows: Rows) -> None:
                await self._store.writer.append(step.scores, rows, scorer=self.scorer, step=step.step)
                self._see(rows)

            part = GroupsPart(self._scoring, groups, step.step, keep)
            first, last = (groups[place].column("group")[0].as_py() for place in (0, -1))
            label = str(first) if first == last else f"{first}-{last}"
            await score(ScoredInTurn(part, self._turns), step.step, label)
            self._check()
        finally:
            self._in_flight.release()

    def _see(self, rows: Rows) -> None:
        errors = [
            error
            for error, status in zip(values(rows, "error"), values(rows, "status"), strict=True)
            if status == "failed"
        ]
        self._n_failed += len(errors)
        self._first_error = self._first_error or str(next(iter(errors), ""))
        self._progress.advance(rows.num_rows)


@asynccontextmanager
async def open_rescoring(folder: RunFolder, config: RescoreConfig) -> AsyncIterator[Rescoring]:
    """Lock the run, and start the scorer's worker processes.

    Raises:
        RunLockedError: a process writes to it.
    """
    quiet_task_runs()
    store = await asyncio.to_thread(OpenRun.extend, folder, config_of=config.store)
    try:
        async with Scoring(config.score, store.manifest.run) as scoring, store.writer:
            yield Rescoring(store, config, scoring)
    finally:
        await asyncio.to_thread(store.close)


def scores_table(folder: RunFolder) -> Table:
    """What each scorer said of a run's rollouts, those of the run itself included."""
    table = Table(title=f"{folder.location}: scores", title_justify="left")
    for column in ("scorer", "mean reward", "scored", "failed", "dropped"):
        table.add_column(column, justify="left" if column == "scorer" else "right")
    for each in score_totals(folder):
        counts = [str(each.by_status[status]) for status in ("scored", "failed", "dropped")]
        table.add_row(each.scorer, f"{each.reward:.4f}", *counts)
    return table
