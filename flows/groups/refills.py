"""Dynamic sampling: further groups of a step in place of those that cannot be trained on."""

from collections.abc import Sequence

from flows.running.run import Run
from tasks.score.outcome import GroupOutcome
from tasks.store.plan import GroupRange, n_refills, plan_rows, refill_after


class Refills:
    """Appends refills to one step's plan.

    A group that cannot be trained on (no spread in reward, too few survivors, ...) gives its place to a further one,
    as in DAPO's dynamic sampling (Yu et al. 2025, arXiv:2503.14476, section 3.2), of which a step has
    `rollout.max_refill_groups` at most. The plan has as many refills as groups were found untrainable, those among
    the refills included, whatever the order; so a process that goes on with a step, and judges what is stored of it
    again, comes to the same number and appends those only that a killed one had not.

    Args:
        run: the run.
        step: its step.
        ranges: what is stored of the step's plan.
        is_closed: True when the step's batch is stored: then nothing is appended.
    """

    def __init__(self, run: Run, step: int, ranges: Sequence[GroupRange], *, is_closed: bool) -> None:
        self._run, self._step, self._ranges = run, step, list(ranges)
        self._most = 0 if is_closed else run.config.rollout.max_refill_groups
        self._n_planned, self._n_untrainable = n_refills(ranges), 0

    async def after(self, outcomes: Sequence[GroupOutcome]) -> int | None:
        """The group that takes the place of one with these outcomes, once the plan has it; None when none does.

        Raises:
            StoreError: the plan could not be stored; nothing of the group was begun.
        """
        if any(not outcome.reason for outcome in outcomes):
            return None
        self._n_untrainable += 1
        if self._n_planned >= min(self._most, self._n_untrainable):
            return None
        refill = refill_after(self._ranges)
        self._ranges.append(refill)
        self._n_planned += refill.n
        await self._run.store.writer.append(
            "plans", plan_rows(self._run.id, self._step, [refill]), step=self._step
        )
        return refill.first

    def lacking(self, outcomes: Sequence[GroupOutcome]) -> str:
        """What a step that may refill lacks after all its refills, in words; empty when it lacks nothing."""
        n_wanted = self._run.config.rollout.groups_per_step
        n_trained = len({outcome.group for outcome in outcomes if not outcome.reason})
        if not self._most or n_trained >= n_wanted:
            return ""
        return (
            f"step {self._step}: after {self._n_planned} refills, of rollout.max_refill_groups = {self._most}, "
            f"{n_trained} of {n_wanted} groups can be trained on"
        )
