"""Which stored groups a step trains on again, in place of groups that it would sample, and their advantages."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock

import numpy as np
import polars as pl

from rollmill.flows.configuration.config import RunConfig
from rollmill.tasks.errors import ShardError
from rollmill.tasks.look.tables.stored_groups import choose_groups, read_stored_groups
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.group_outcomes import GroupOutcome, RolloutOrigin
from rollmill.tasks.score.stored_scores import recompute_advantages
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.group_draw import StoredGroup
from rollmill.tasks.store.reader import list_steps, read
from rollmill.tasks.store.run.group_ranges import GroupRange, read_plan, replayed_groups
from rollmill.tasks.store.run.manifest import Manifest, read_manifest
from rollmill.tasks.store.run.resume import list_done_steps
from rollmill.tasks.store.run.run_search import find_run

FIELD = "rollout.replay.sources"
# So that stored groups are not drawn by the same numbers as problems are.
_STREAM = 1 << 20


@dataclass(slots=True)
class ReplayChoice:
    """Draws the stored groups of a run's steps: from its own earlier steps and from other runs, by `rollout.replay`.

    They are drawn when a step is planned, from what is stored by then, and stored with the plan. So a resumed run trains on the
    same groups, whatever has been stored meanwhile.

    Args:
        folder: of the run.
        config: settings of the run.
        scorer: NAME@VERSION of the run's scores.
        score_of: settings of scoring of each environment, by name.
    """

    folder: RunFolder
    config: RunConfig
    scorer: str
    score_of: Mapping[str, ScoreConfig]
    _groups: list[pl.DataFrame] = field(default_factory=list)
    _read: set[tuple[str, int]] = field(default_factory=set)
    _shared: set[tuple[str, int, int]] = field(default_factory=set)
    _replays: Counter[StoredGroup] = field(default_factory=Counter)
    _counted: set[int] = field(default_factory=set)
    # Steps are planned in several threads.
    _reading: Lock = field(default_factory=Lock)

    def plan(self, step: int, planned: GroupRange) -> tuple[GroupRange, ...]:
        """Draw stored groups for a step, each in place of one of its planned groups; at least one planned group is left.

        Raises:
            ConfigError: rollout.replay is wrong, or a source is no run or lacks the scores.
            ShardError: a shard cannot be read.
        """
        n = min(round(self.config.rollout.replay.share * planned.n), planned.n - 1)
        if not n:
            return ()
        chosen = self._choose(step, n)
        # At random places: then each environment, and each update of the step, has its share of stored groups.
        numbers = np.random.default_rng([self.config.seed, step, _STREAM])
        places = sorted(numbers.choice(planned.n, len(chosen), replace=False).tolist())
        return tuple(
            GroupRange(planned.first + place, 1, "replay", stored=each)
            for place, each in zip(places, chosen, strict=True)
        )

    def read_outcomes(self, step: int) -> tuple[list[GroupOutcome], dict[int, RolloutOrigin]]:
        """Return the outcomes of the stored groups in a step's plan, with the numbers of the plan, and where each is stored.

        Raises:
            ShardError: a shard cannot be read, or a group is not stored any more; names it.
        """
        outcomes: list[GroupOutcome] = []
        origins: dict[int, RolloutOrigin] = {}
        by_step: dict[tuple[str, int], dict[int, int]] = {}
        for number, stored in replayed_groups(read_plan(self.folder, step)).items():
            by_step.setdefault((stored.source, stored.step), {})[stored.group] = number
            origins[number] = RolloutOrigin(stored.source, stored.step)
        for (source, source_step), numbers in by_step.items():
            folder = RunFolder(source) if source else self.folder
            found = self._compute(folder, source_step, numbers.keys())
            if gone := sorted(numbers.keys() - found.keys()):
                raise ShardError(
                    f"step {step} trains on group {gone[0]} of step {source_step} of {folder.location}, which is not stored there "
                    "any more: bring the run back to its folder"
                )
            outcomes += [
                replace(outcome, group=numbers[group]) for group, each in found.items() for outcome in each
            ]
        return outcomes, origins

    def _choose(self, step: int, n: int) -> list[StoredGroup]:
        with self._reading:
            own = read_manifest(self.folder)
            self._add_steps(
                self.folder, own, [each for each in list_done_steps(self.folder, own) if each < step]
            )
            for source in map(find_run, self.config.rollout.replay.sources):
                manifest = read_manifest(source)
                self._add_steps(source, manifest, list_done_steps(source, manifest))
            self._count_replays(step)
            if not self._groups:
                return []
            groups = self._describe(pl.concat(self._groups), step)
        replay = self.config.rollout.replay
        seed = [self.config.seed, step, _STREAM + 1]
        chosen = choose_groups(groups, replay.where, replay.order_by, seed).head(n)
        return [self._locate(*key) for key in chosen.iter_rows()]

    def _add_steps(self, folder: RunFolder, manifest: Manifest, steps: Sequence[int]) -> None:
        """Add the trainable groups of those steps of a run that were not read; a group that runs share is added once."""
        for step in steps:
            if (folder.location, step) in self._read:
                continue
            trainable = {
                group
                for group, outcomes in self._compute(folder, step).items()
                if any(not outcome.reason for outcome in outcomes)
                and (manifest.run_at_step(step), step, group) not in self._shared
            }
            if trainable:
                groups = read_stored_groups(folder, self.scorer, step)
                self._groups.append(groups.filter(pl.col("group").is_in(sorted(trainable))))
            self._shared |= {(manifest.run_at_step(step), step, group) for group in trainable}
            self._read.add((folder.location, step))

    def _compute(
        self, folder: RunFolder, step: int, only: Collection[int] | None = None
    ) -> dict[int, tuple[GroupOutcome, ...]]:
        """Compute the outcomes of a step's groups, each by the settings of its environment; those of others by the run's."""
        rows = read(folder, "groups", ["group", "env"], step=step)
        by_env: dict[str, set[int]] = {}
        for group, env in zip(rows["group"].to_pylist(), rows["env"].to_pylist(), strict=True):
            if only is None or group in only:
                by_env.setdefault(env, set()).add(group)
        found: dict[int, tuple[GroupOutcome, ...]] = {}
        for env, groups in by_env.items():
            config = self.score_of.get(env, self.config.score)
            found |= recompute_advantages(folder, step, self.scorer, config, only=groups, field=FIELD)
        return dict(sorted(found.items()))

    def _count_replays(self, step: int) -> None:
        for each in list_steps(self.folder, "plans"):
            if each < step and each not in self._counted:
                self._replays.update(replayed_groups(read_plan(self.folder, each)).values())
                self._counted.add(each)

    def _describe(self, groups: pl.DataFrame, step: int) -> pl.DataFrame:
        """Add steps_ago, null for groups of other runs, and replays: how many earlier steps trained on the group again."""
        is_own = pl.col("location") == self.folder.location
        keys = groups.select("location", "step", "group").iter_rows()
        replays = [self._replays[self._locate(*key)] for key in keys]
        return groups.with_columns(
            pl.when(is_own).then(step - pl.col("step")).alias("steps_ago"),
            pl.Series("replays", replays, pl.Int64),
        )

    def _locate(self, location: str, step: int, group: int) -> StoredGroup:
        source = "" if location == self.folder.location else RunFolder(location).absolute
        return StoredGroup(source, step, group)
