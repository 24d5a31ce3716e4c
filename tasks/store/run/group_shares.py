"""Which environment each group of a run belongs to: a pure function of the group's number and the environments' weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rollmill.tasks.store.run.group_ranges import GroupRange


@dataclass(frozen=True, slots=True)
class GroupShares:
    """Numbers a run's groups, and gives each environment its share of them in proportion to its weight.

    After any number of groups, refills left out, each environment has had less than one group more or less than its exact share. So
    a step has exactly its share where that is whole, and the sums over steps never differ by 1 or more.

    A step's numbers are those of its groups, followed by `max_refill_groups` numbers for refills of each environment. An environment
    walks through its problems in the order of its groups, and skips those of refills that no step needed.

    Attributes:
        weights: of each environment, in the order of the environments; a run with one has (1,).
        groups_per_step: groups that a step plans.
        max_refill_groups: largest number of refills of a step.

    Example: with weights 2, 1, 1 the groups 0 to 7 are of the environments 0, 1, 2, 0, 0, 1, 2, 0.
    """

    weights: tuple[int, ...] = (1,)
    groups_per_step: int = 1
    max_refill_groups: int = 0

    @property
    def _numbers_per_step(self) -> int:
        return self.groups_per_step + self.max_refill_groups * len(self.weights)

    def plan(self, step: int) -> GroupRange:
        """Return the groups that a step plans.

        Example: step 3 of 32 groups each begins at group 96; with one environment and at most 8 refills a step at group 120, and the
        groups 152 to 159 are its refills, if it needs any.
        """
        return GroupRange(step * self._numbers_per_step, self.groups_per_step)

    def plan_refill(self, ranges: Sequence[GroupRange], replaced: int) -> GroupRange:
        """Return the next refill of a step in place of the group `replaced`: of the same environment, numbered after its others.

        Example: the plan (120, 32) of one environment is followed by (152, 1), and that by (153, 1).
        """
        environment = self.environment(replaced)
        n = sum(
            each.n
            for each in ranges
            if each.reason == "refill" and self.environment(each.first) == environment
        )
        first = ranges[0].first + self.groups_per_step + environment * self.max_refill_groups
        return GroupRange(first + n, 1, "refill")

    def environment(self, group: int) -> int:
        """Return the index of a group's environment."""
        step, place = divmod(group, self._numbers_per_step)
        if place >= self.groups_per_step:
            return (place - self.groups_per_step) // self.max_refill_groups
        return _assign(self.weights)[(step * self.groups_per_step + place) % sum(self.weights)]

    def problem(self, group: int) -> int:
        """Return how many problems of its environment come before a group's, those of the refills of earlier steps included.

        Example: of one environment it is the group's number.
        """
        step, place = divmod(group, self._numbers_per_step)
        environment, refills = self.environment(group), step * self.max_refill_groups
        if place >= self.groups_per_step:
            number = (place - self.groups_per_step) % self.max_refill_groups
            return self._count(environment, (step + 1) * self.groups_per_step) + refills + number
        return self._count(environment, step * self.groups_per_step + place) + refills

    def count(self, environment: int, step: int) -> int:
        """Count the groups of an environment that a step plans."""
        first = step * self.groups_per_step
        return self._count(environment, first + self.groups_per_step) - self._count(environment, first)

    def most_per_step(self, environment: int) -> int:
        """Return the largest number of groups of an environment that any step plans."""
        # After as many steps as the period has groups, the steps repeat.
        return max(self.count(environment, step) for step in range(sum(self.weights)))

    def _count(self, environment: int, n: int) -> int:
        """Count the groups of an environment among the first `n` planned groups of the run."""
        periods, rest = divmod(n, sum(self.weights))
        return periods * self.weights[environment] + _count_before(self.weights, environment)[rest]


@lru_cache(maxsize=4)
def _assign(weights: tuple[int, ...]) -> tuple[int, ...]:
    """Return the environment of each of the first sum(weights) groups, after which they repeat.

    The k-th group (from 0) of an environment with share f may be neither before number floor(k / f) nor after number
    ceil((k + 1) / f) - 1, from 0. Of the environments that may have a group, the one with the earliest last number gets it, which
    meets all bounds (Baruah, Cohen, Plaxton, Varvel, Proportionate progress, 1996).
    """
    total, counts = sum(weights), [0] * len(weights)
    found = []
    for number in range(total):
        last, chosen = min(
            (-(-(count + 1) * total // weight) - 1, at)
            for at, (count, weight) in enumerate(zip(counts, weights, strict=True))
            if count * total // weight <= number
        )
        assert number <= last
        counts[chosen] += 1
        found.append(chosen)
    return tuple(found)


@lru_cache(maxsize=64)
def _count_before(weights: tuple[int, ...], environment: int) -> tuple[int, ...]:
    """Return how many of the first n groups of a period an environment has, for n from 0 to the period."""
    counts = [0]
    for each in _assign(weights):
        counts.append(counts[-1] + (each == environment))
    return tuple(counts)
