"""What a run has seen of each problem of its environments so far, from its stored groups."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import numpy.typing as npt
import polars as pl

from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_steps, scan
from rollmill.tasks.store.run.group_ranges import drawn_problems, group_numbers, read_plan
from rollmill.tasks.store.run.group_shares import GroupShares
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.store.run.resume import list_done_steps

Floats = npt.NDArray[np.float64]
# Numbers a problem of an environment, given the environment and how many of its problems come before.
NumberProblem = Callable[[int, int], int]

_MEASURES = {"reward": "reward_mean", "reward_std": "reward_std", "tokens": "tokens_mean"}


@dataclass(slots=True)
class _Visits:
    """Sums over the visits of each problem of an environment. Attributes have one number for each problem.

    Attributes:
        n: visits.
        last_step: step of the last visit.
        sums: of each measure, over the visits that have it.
        counts: visits that have the measure.
    """

    n: npt.NDArray[np.int64]
    last_step: npt.NDArray[np.int64]
    sums: dict[str, Floats]
    counts: dict[str, Floats]

    @classmethod
    def none(cls, size: int) -> "_Visits":
        zeros = np.zeros(size)
        return cls(
            np.zeros(size, np.int64),
            np.full(size, -1),
            {name: zeros.copy() for name in _MEASURES},
            {name: zeros.copy() for name in _MEASURES},
        )

    def add(self, problems: npt.NDArray[np.int64], step: int, rows: pl.DataFrame) -> None:
        np.add.at(self.n, problems, 1)
        # A later step may have been added before.
        np.maximum.at(self.last_step, problems, step)
        for name, column in _MEASURES.items():
            values = rows[column].to_numpy()
            is_known = np.isfinite(values)
            np.add.at(self.sums[name], problems[is_known], values[is_known])
            np.add.at(self.counts[name], problems[is_known], 1.0)

    def mean(self, name: str) -> Floats:
        means = np.full(len(self.n), np.nan)
        np.divide(self.sums[name], self.counts[name], out=means, where=self.counts[name] > 0)
        return means


@dataclass(slots=True)
class ProblemHistory:
    """The visits of a run's problems in those earlier steps all of whose groups are stored.

    A visit is a group that was sampled, trained on or not.

    Attributes:
        folder: of the run.
        shares: which environment each group belongs to.
        sizes: training problems of each environment.
        number_problem: index of a problem, where the plan does not name it.
    """

    folder: RunFolder
    shares: GroupShares
    sizes: Sequence[int]
    number_problem: NumberProblem
    _visits: list[_Visits] = field(init=False)
    _added: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    _done: set[int] = field(default_factory=set)
    _reading: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self._visits = [_Visits.none(size) for size in self.sizes]

    def read_until(self, step: int) -> None:
        """Add the groups that were not added, of the steps before `step` whose groups are all stored."""
        with self._reading:
            # A refill may still be added to the plan of a step that is not done.
            done = {*list_done_steps(self.folder, read_manifest(self.folder))}
            for each in list_steps(self.folder, "plans"):
                if each < step and each not in self._done and self._read(each) and each in done:
                    self._done.add(each)
                    del self._added[each]

    def _read(self, step: int) -> bool:
        """Add the groups of a step that were not added, and return True, if all groups of its plan are stored."""
        ranges = read_plan(self.folder, step)
        columns = ["group", "subgroup", *_MEASURES.values()]
        rows = scan(self.folder, "groups", columns, step=step).collect()
        # A scorer may have split a group: it is one visit, of which the first part counts.
        rows = rows.sort("group", "subgroup").unique("group", keep="first", maintain_order=True)
        if not {*group_numbers(ranges)} <= {*rows["group"]}:
            return False
        rows = rows.filter(~pl.col("group").is_in(self._added[step]))
        groups, drawn = rows["group"].to_list(), drawn_problems(ranges)
        self._added[step] |= {*groups}
        environments = np.array([self.shares.environment(group) for group in groups])
        problems = np.array([self.find_problem(group, drawn) for group in groups], np.int64)
        for environment, visits in enumerate(self._visits):
            of_it = environments == environment
            visits.add(problems[of_it], step, rows.filter(pl.Series(of_it)))
        return True

    def find_problem(self, group: int, drawn: Mapping[int, int]) -> int:
        """Return the index of a group's problem in its environment: the drawn one, or that which follows from its number."""
        if group in drawn:
            return drawn[group]
        return self.number_problem(self.shares.environment(group), self.shares.problem(group))

    def frame(self, environment: int, step: int) -> pl.DataFrame:
        """Return a row for each training problem of an environment.

        Columns: problem (index), visits, steps_ago (from the last visit to `step`), and the means over its visits of reward, reward_std
        (standard deviation within the group) and tokens (sampled, by trajectory); null without a visit that has them.
        """
        visits = self._visits[environment]
        last = pl.Series("steps_ago", visits.last_step)
        return pl.DataFrame(
            {"problem": np.arange(len(visits.n)), "visits": visits.n}
            | {name: visits.mean(name) for name in _MEASURES}
        ).with_columns(
            pl.when(last >= 0).then(step - last).alias("steps_ago"), pl.col(*_MEASURES).fill_nan(None)
        )

    def tokens(self, environment: int) -> Floats:
        """Return the mean sampled tokens of each problem of an environment; NaN where they are not known."""
        return self._visits[environment].mean("tokens")


def draw_problems(
    weights: Floats, n: int, seed: Sequence[int], without: frozenset[int] = frozenset()
) -> list[int]:
    """Draw problems without replacement, one after the other in proportion to the weights of those that remain.

    Problems of weight 0 are drawn, each as often as another, only where too few others are left. The same arguments give the same
    problems.

    Args:
        weights: [problems] at least 0.
        n: at most the number of problems, those of `without` left out.
        seed: of the draw.
        without: problems that are not drawn.
    """
    # Each problem rings after an exponential time whose rate is its weight: the order in which they ring is that of such draws
    # (Efraimidis and Spirakis, Weighted random sampling with a reservoir, 2006). Those of weight 0 ring at infinity.
    times = np.random.default_rng(seed).exponential(size=len(weights))
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        # Divided by the largest, so that weights of any size give numbers.
        rings = times / (weights / (weights.max(initial=0.0) or 1.0))
    is_left = np.ones(len(weights), bool)
    is_left[list(without)] = False
    left = np.flatnonzero(is_left)
    drawn = left[np.lexsort((times[left], rings[left]))[:n]]
    return [int(each) for each in drawn]
