"""The trainer's own log-probabilities of finished rollouts, computed while it would wait for the step to be collected."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

from tasks.errors import RollmillError
from tasks.observe.metrics import Metric
from tasks.observe.waits import Lock

NO_STEP = -1

Score = Callable[[int, Sequence[str]], Awaitable[None]]
"""Has the trajectories of a step scored, and the rows stored."""


class Recomputing:
    """Gathers what is sampled, and hands it to the trainer in bundles, as long as that stands at their step.

    What is not scored by the time that the step is trained, the trainer computes then; and so it does with what failed
    here, which is why a failure is counted and no more.

    Args:
        bundle_rows: most trajectories at a time: a step that is to be trained waits for one bundle at most.

    Attributes:
        hidden_s: seconds that the trainer took of its spare time for the step that it stands at.
        n_failed: bundles that failed.
    """

    def __init__(self, bundle_rows: int) -> None:
        self._bundle_rows = bundle_rows
        self._waiting: dict[int, list[str]] = defaultdict(list)
        self._step = NO_STEP
        self._look = asyncio.Event()
        self._busy = Lock()
        self.hidden_s = 0.0
        self.n_failed = 0

    def add(self, step: int, trajectory_ids: Sequence[str]) -> None:
        """Take up trajectories of a step that are stored."""
        self._waiting[step] += trajectory_ids
        self._look.set()

    def begin(self, step: int) -> None:
        """Say that the trainer stands at a step and has nothing else to do."""
        self._waiting = defaultdict(list, {each: ids for each, ids in self._waiting.items() if each >= step})
        self._step, self.hidden_s = step, 0.0
        self._look.set()

    async def end(self) -> float:
        """Begin no more bundles; returns the seconds waited for the one under way."""
        self._step, started = NO_STEP, time.perf_counter()
        async with self._busy:
            return time.perf_counter() - started

    def metrics(self, of_step: Sequence[Metric], waited_s: float) -> list[Metric]:
        """What recomputing took of the trainer's spare time, and of a step's.

        Args:
            of_step: the trainer's own, with the seconds in which it computed what was left.
            waited_s: seconds that the step waited for a bundle.
        """
        in_step_s = sum(each.value for each in of_step if each.name == "train/trainer_logprobs_s")
        values = {
            "train/recompute_hidden_s": max(0.0, self.hidden_s - waited_s),
            "train/recompute_exposed_s": waited_s + in_step_s,
            "train/recompute_failures_so_far": float(self.n_failed),
        }
        return [Metric(name, "all", "value", value) for name, value in values.items()]

    async def work(self, score: Score) -> None:
        """Hand over bundles for ever."""
        while True:
            await self._look.wait()
            self._look.clear()
            while bundle := self._take():
                async with self._busy:
                    await self._scored(score, bundle)

    def _take(self) -> list[str]:
        waiting = self._waiting[self._step]
        bundle, self._waiting[self._step] = waiting[: self._bundle_rows], waiting[self._bundle_rows :]
        return bundle

    async def _scored(self, score: Score, bundle: list[str]) -> None:
        started, step = time.perf_counter(), self._step
        if step == NO_STEP:
            return
        try:
            await score(step, bundle)
        except RollmillError:
            self.n_failed += 1
        self.hidden_s += time.perf_counter() - started
