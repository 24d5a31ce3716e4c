"""The flow rescore: scores stored rollouts with another scorer, into a separate partition of the data set scores."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from prefect import flow

from rollmill.flows.checks.machine_needs import check_store
from rollmill.flows.configuration.config import RescoreConfig
from rollmill.flows.configuration.forms import RescoreSettings
from rollmill.flows.failure import one_error
from rollmill.flows.offline.unscored import (
    UnscoredRows,
    UnscoredStep,
    check_rescoring,
    describe_first_error,
)
from rollmill.flows.prefect_integration.artifacts import show_page
from rollmill.flows.prefect_integration.leftovers import mark_cancelled
from rollmill.flows.prefect_integration.private_prefect import end_in_order
from rollmill.flows.prefect_integration.progress import count_progress, quiet_task_runs, say
from rollmill.flows.prefect_integration.recording import Recording
from rollmill.flows.prefect_integration.run_pages import scores_page
from rollmill.flows.prefect_integration.task_runs import TaskRunRecorder
from rollmill.flows.run.folder import RunName, run_folder
from rollmill.tasks.errors import FailedScoresError
from rollmill.tasks.rollout.trajectory_requests import split_chunks
from rollmill.tasks.score.scoring import Scoring
from rollmill.tasks.score.task import ScoreChunk
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.rows import Rows, rows_where
from rollmill.tasks.store.run.run_search import check_run
from rollmill.tasks.store.run.writable_run import OpenRun


@flow(name="rescore", flow_run_name="{run_name}", persist_result=False, on_cancellation=[mark_cancelled])
async def rescore(run_name: RunName, config: RescoreSettings) -> str:
    """Score the stored rollouts of a run, finished or not; existing scores by the same scorer are kept.

    Args:
        run_name: folder of the run below `store.root`.
        config: all settings.

    Returns:
        The scorer's NAME@VERSION, under which the scores are stored.
    """
    folder = run_folder(run_name, config)
    await asyncio.to_thread(check_store, config.store.root)
    check_run(folder)
    check_rescoring(folder, config)
    with end_in_order(), one_error():
        async with open_rescoring(folder, config) as rescoring:
            await rescoring.finish()
    await show_page(f"{folder.name}-scores", partial(scores_page, folder))
    return rescoring.scorer


class Rescoring:
    """Scores the stored trajectories of one run, which is open for writing, with one scorer."""

    def __init__(self, store: OpenRun, config: RescoreConfig, scoring: Scoring) -> None:
        self.scorer = scoring.key
        self._store, self._config, self._scoring = store, config, scoring
        self._unscored = UnscoredRows(store.folder, config, scoring)
        self._recording = Recording()
        # Each call is a task run, also where a run would record none: a rescoring has few of them.
        observe = config.observe.model_copy(update={"task_runs": "all"})
        self._recorder = TaskRunRecorder(observe, self._recording)
        self._in_flight = asyncio.Semaphore(config.tasks_in_flight)
        self._n_scores, self._n_failed, self._first_error = 0, 0, ""

    async def finish(self) -> None:
        """Score every trajectory that has no score yet, step by step, with several groups in each task run.

        Raises:
            FailedScoresError: more scores failed than max_failed_share allows, earlier ones included.
        """
        steps = await asyncio.to_thread(self._unscored.count_steps)
        left = [step for step in steps if step.n_trajectories]
        total = sum(step.n_trajectories for step in left)
        self._n_scores = total + sum(step.n_scored for step in steps)
        self._n_failed = sum(step.n_failed for step in steps)
        self._first_error = next((step.first_error for step in steps if step.n_failed), "")
        # A run whose stored scores fail too often stops before it scores more.
        self._check()
        if not total:
            numbers = [step.step for step in steps]
            chosen = f" of the groups where {self._config.where}" if self._config.where else ""
            which = f"stored trajectory{chosen} of steps {min(numbers)} to {max(numbers)}"
            say(f"scores/scorer={self.scorer} is complete: every {which} has its score")
            return
        with count_progress(self.scorer, total) as self._advance:
            async with asyncio.TaskGroup() as scoring:
                for step in left:
                    # Before new scores are appended: a partition is replaced as a whole.
                    kept, n_stale = await asyncio.to_thread(self._unscored.read_kept_scores, step)
                    if n_stale:
                        await self._store.writer.replace(
                            step.scores, kept, scorer=self.scorer, step=step.step
                        )
                    groups = await asyncio.to_thread(self._unscored.read_groups, step)
                    for part in split_chunks(groups, self._config.groups_per_task):
                        # Here and not in the task: what waits for a slot is not read into memory.
                        await self._in_flight.acquire()
                        scoring.create_task(self._score(step, part))
        if self._n_failed:
            say(
                f"{self._n_failed} of {self._n_scores} scores failed and are stored as failed; the first: {self._first_error}"
            )
        await self._recording.wait_until_recorded()

    def _check(self) -> None:
        if self._n_failed <= self._config.max_failed_share * self._n_scores:
            return
        raise FailedScoresError(
            f"{self._n_failed} of {self._n_scores} scores by {self.scorer} failed, max_failed_share allows "
            f"{self._config.max_failed_share:g}; the first: {self._first_error}\nstored scores are kept: fix the cause and "
            "give --redo-failed, or raise max_failed_share to continue"
        )

    async def _score(self, step: UnscoredStep, groups: Sequence[Rows]) -> None:
        """Score some groups of a step in one task run and store the scores; then release the slot that the caller acquired."""
        try:
            # Task runs begin no faster than Prefect records them, or its queue grows without bound.
            await self._recording.hold_back()

            def store(rows: Rows) -> Awaitable[None]:
                self._see(rows)
                return self._store.writer.append(step.scores, rows, scorer=self.scorer, step=step.step)

            chunk = ScoreChunk(self._scoring, groups, step.step, store)
            first, last = (groups[place].column("group")[0].as_py() for place in (0, -1))
            label = str(first) if first == last else f"{first}-{last}"
            async with self._recorder.score(chunk, step.step, label) as scoring:
                with self._store.writer.expect_rows():
                    scored = scoring.done(await scoring.work())
            await asyncio.gather(*scored.acknowledgements)
            self._check()
        finally:
            self._in_flight.release()

    def _see(self, rows: Rows) -> None:
        failed = rows_where(rows, "status", "failed")
        self._n_failed += failed.num_rows
        self._first_error = self._first_error or describe_first_error(failed)
        self._advance(rows.num_rows)


@asynccontextmanager
async def open_rescoring(folder: RunFolder, config: RescoreConfig) -> AsyncIterator[Rescoring]:
    """Lock the run, start the scorer's worker processes and yield a Rescoring; both end with the context.

    Raises:
        RunLockedError: another process writes to the run.
    """
    quiet_task_runs()
    store = await asyncio.to_thread(OpenRun.extend, folder, config_of=config.store)
    try:
        # A scorer of stored rollouts has the variables that the run's scorers had.
        variables = store.manifest.config.get("rollout", {}).get("env_variables", [])
        scoring = Scoring(config.score, store.manifest.run, env_variables=variables)
        await asyncio.to_thread(store.keep_scorer, scoring.key, scoring.description)
        async with scoring, store.writer:
            yield Rescoring(store, config, scoring)
    finally:
        await asyncio.to_thread(store.close)
