"""Which problem each group of a step has, and in which order the groups begin."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.run.run_environment import RunEnvironment
from rollmill.tasks.look.tables.problem_weights import weigh_problems
from rollmill.tasks.rollout.trajectory_requests import example_index
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.group_ranges import GroupRange, drawn_problems
from rollmill.tasks.store.run.group_shares import GroupShares
from rollmill.tasks.store.run.problem_history import Floats, ProblemHistory, draw_problems


@dataclass(frozen=True, slots=True)
class ProblemChoice:
    """Chooses the problems of a run's groups: each once an epoch, or by `rollout.problem_weight`.

    Weights are computed when a step is planned, from the earlier steps that are stored by then, and what was drawn is stored with the
    plan. So a resumed run has the same problems, whatever it has stored meanwhile.

    Attributes:
        shares: says which environment each group belongs to.
    """

    folder: RunFolder
    config: RunConfig
    shares: GroupShares
    environments: Sequence[RunEnvironment]
    _history: ProblemHistory = field(init=False)

    def __post_init__(self) -> None:
        sizes = [each.environment.size("train") for each in self.environments]
        history = ProblemHistory(self.folder, self.shares, sizes, self._number)
        object.__setattr__(self, "_history", history)

    def _number(self, environment: int, before: int) -> int:
        return example_index(
            self.config.seed, before, self.environments[environment].environment.size("train")
        )

    def index(self, group: int, drawn: Mapping[int, int]) -> int:
        """Return the index of a group's problem among the training problems of its environment; `drawn` has those of the plan."""
        return self._history.find_problem(group, drawn)

    def plan(self, step: int) -> GroupRange:
        """Return the groups of a step, with their problems if any environment draws them by weight."""
        planned = self.shares.plan(step)
        weighed = [at for at, each in enumerate(self.environments) if each.config.rollout.problem_weight]
        if not weighed:
            return planned
        self._history.read_until(step)
        drawn: dict[int, int] = {}
        for environment in weighed:
            weights = self._weights(environment, step)
            numbers = range(planned.first, planned.first + planned.n)
            groups = [group for group in numbers if self.shares.environment(group) == environment]
            chosen = draw_problems(weights, len(groups), [self.config.seed, step, environment])
            drawn |= zip(groups, chosen, strict=True)
        problems = (self.index(planned.first + at, drawn) for at in range(planned.n))
        return replace(planned, problems=tuple(problems))

    def plan_refill(self, step: int, ranges: Sequence[GroupRange], replaced: int) -> GroupRange:
        """Return the next refill of a step in place of a group; by weight, its problem is one that the step does not have."""
        refill = self.shares.plan_refill(ranges, replaced)
        environment = self.shares.environment(refill.first)
        if not self.environments[environment].config.rollout.problem_weight:
            return refill
        self._history.read_until(step)
        of_step = drawn_problems(ranges)
        there = {
            problem for group, problem in of_step.items() if self.shares.environment(group) == environment
        }
        weights = self._weights(environment, step)
        return replace(
            refill,
            problems=tuple(draw_problems(weights, 1, [self.config.seed, refill.first], frozenset(there))),
        )

    def _weights(self, environment: int, step: int) -> Floats:
        weight = self.environments[environment].config.rollout.problem_weight
        return weigh_problems(weight, self._history.frame(environment, step))

    async def order(self, step: int, groups: Sequence[int], drawn: Mapping[int, int]) -> Sequence[int]:
        """Return the groups of a step in the order in which they begin.

        With `rollout.longest_first` those whose problems had the most tokens at earlier visits are first, and a problem without a visit
        counts as the mean of the others; equal ones keep their order.
        """
        if not self.config.rollout.longest_first:
            return groups
        await asyncio.to_thread(self._history.read_until, step)
        tokens = [self._tokens(group, drawn) for group in groups]
        known = [each for each in tokens if not math.isnan(each)]
        mean = float(np.mean(known)) if known else 0.0
        lengths = dict(zip(groups, (mean if math.isnan(each) else each for each in tokens), strict=True))
        return sorted(groups, key=lambda group: -lengths[group])

    def _tokens(self, group: int, drawn: Mapping[int, int]) -> float:
        return float(self._history.tokens(self.shares.environment(group))[self.index(group, drawn)])
