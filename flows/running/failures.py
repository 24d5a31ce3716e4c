"""Failures of a step: each logged once, when it is seen, and so many of them end the run."""

import logging
from collections import Counter
from collections.abc import Callable

from flows.looking.view import visible
from tasks.errors import FailedShareError
from tasks.store.rows import Rows

FAILED = ("failed", "cancelled")
LOST = (*FAILED, "dropped")
COLUMNS = ["trajectory_id", "status", "error_type", "error"]


class FailureWatch:
    """Watches rows of rollouts and of scores as they come.

    Args:
        step: the step they are of.
        n_planned: trajectories of the step.
        max_share: share of them that may fail.
        logger: gives the logger of the task run, or flow run, that saw the failure.
    """

    def __init__(
        self,
        step: int,
        n_planned: int,
        max_share: float,
        logger: Callable[[], logging.Logger | logging.LoggerAdapter[logging.Logger]],
    ) -> None:
        self._step, self._n_planned, self._max_share, self._logger = step, n_planned, max_share, logger
        self._kinds: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def see(self, rows: Rows, *, is_new: bool = True) -> None:
        """Log what failed, was cut or dropped among rows of `rollouts` or `scores`, if new.

        What failed or was cut counts as failed; what a scorer dropped does not.

        Raises:
            FailedShareError: more failed than the share allows; says what failed most.
        """
        for row in rows.select(COLUMNS).to_pylist():
            if row["status"] not in LOST:
                continue
            if is_new:
                said = (visible(str(row[column])) for column in COLUMNS)
                self._logger().warning("trajectory %s %s: %s: %s", *said)
            if row["status"] in FAILED:
                self._kinds[row["error_type"]] += 1
                self._examples.setdefault(row["error_type"], row["error"])
        self._check()

    def plan_more(self, n: int) -> None:
        """So many further trajectories of the step are planned: those of a refill."""
        self._n_planned += n

    @property
    def n_failed(self) -> int:
        """How many failed or were cut."""
        return self._kinds.total()

    def _check(self) -> None:
        if self.n_failed <= self._max_share * self._n_planned:
            return
        (kind, n), *_ = self._kinds.most_common(1)
        raise FailedShareError(
            f"step {self._step}: {self.n_failed} of {self._n_planned} trajectories failed, rollout.max_failed_share allows "
            f"{self._max_share:g}; {n} times {kind}, for example: {self._examples[kind]}\n"
            "what is stored stays, failed rows are not sampled again: mend the cause, and raise the share to go on"
        )
