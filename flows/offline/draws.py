"""The training data of the flow retrain: groups of other runs, drawn for each step, with new advantages."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean
from typing import Self

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.offline.retrain_sources import check_teacher_rows, find_source_steps
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.run_frames import RunFrames
from rollmill.tasks.rollout.trajectory import NO_VERSION
from rollmill.tasks.score.group_outcomes import (
    GroupOutcome,
    RolloutOrigin,
    batch_rows,
    compute_batch_advantages,
    group_rows,
)
from rollmill.tasks.score.stored_scores import recompute_advantages
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.group_draw import Order, StoredGroup, draw_groups
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.store.run.run_search import find_run
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.stored_batch import read_batch_digest

_VERSION = "policy_version_first"


@dataclass(frozen=True, slots=True)
class Draw:
    """The batch that the flow retrain has drawn from stored groups and stored for one step.

    Attributes:
        digest: of the batch.
        reward: mean over the groups that are trained on of their mean reward.
        tokens: sampled tokens of its trajectories.
    """

    step: int
    digest: str
    reward: float
    tokens: int


@dataclass(frozen=True, slots=True)
class GroupPool:
    """All groups of the runs in `retrain.sources` that meet `retrain.where` and can be trained on.

    Attributes:
        left_out: number of other groups, by the reason why they cannot be trained on.
        order: in which a step draws them.
    """

    groups: tuple[StoredGroup, ...]
    left_out: Counter[str]
    order: Order = "random"

    @classmethod
    def read(cls, config: RunConfig) -> Self:
        """Read the groups of `config.retrain.sources` that can be trained on; one that several sources share counts once.

        Raises:
            ConfigError: a source is not a run or lacks the scores, no group can be trained on, or trajectories lack the
                log-probabilities of train.kl.teacher.
        """
        trainable: list[StoredGroup] = []
        left_out: Counter[str] = Counter()
        ids: dict[tuple[str, int], list[str]] = {}
        for group, outcomes in _all_outcomes(config):
            if any(not outcome.reason for outcome in outcomes):
                trainable.append(group)
                trained = (survivor for outcome in outcomes for survivor, *_ in outcome.trained)
                ids.setdefault((group.source, group.step), []).extend(each.trajectory_id for each in trained)
            else:
                left_out[outcomes[0].reason] += 1
        if config.train.kl.reference == "stored":
            check_teacher_rows(config.train.kl.teacher, ids)
        groups, order = _order_groups(config, trainable)
        if n_left_out := len(trainable) - len(groups):
            left_out["weight 0"] += n_left_out
        if not groups:
            why = ", ".join(f"{n} {reason}" for reason, n in left_out.items()) or "none is stored"
            remedy = f"no group of the sources can be trained on ({why})"
            raise ConfigError("retrain.sources", config.retrain.sources, remedy)
        return cls(tuple(groups), left_out, order)

    def find_imported(self) -> set[tuple[str, int]]:
        """Return the sources, with the step there, whose trajectories were imported: nobody knows their sampler's log-probabilities."""
        return {
            (source, step)
            for source, step in {(each.source, each.step) for each in self.groups}
            if NO_VERSION in read(RunFolder(source), "rollouts", [_VERSION], step=step)[_VERSION].to_pylist()
        }

    def list_trained(self, config: RunConfig, step: int) -> dict[tuple[str, int], list[str]]:
        """Return the ids of the trajectories that a step trains on, by their source and the step there."""
        ids: dict[tuple[str, int], list[str]] = {}
        for stored, outcomes in self.draw(config, step):
            trained = (survivor.trajectory_id for each in outcomes for survivor, *_ in each.trained)
            ids.setdefault((stored.source, stored.step), []).extend(trained)
        return ids

    def draw(self, config: RunConfig, step: int) -> list[tuple[StoredGroup, tuple[GroupOutcome, ...]]]:
        """Draw a step's groups with their outcomes, sorted by source and step; the same seed and step draw the same groups."""
        chosen = draw_groups(
            self.groups,
            seed=config.seed,
            step=step,
            groups_per_step=config.rollout.groups_per_step,
            order=self.order,
        )
        found = []
        # Sorted by source and step, so that each stored step is read once.
        for (source, source_step), of_step in groupby(sorted(chosen), lambda each: (each.source, each.step)):
            wanted = {each.group: each for each in of_step}
            computed = _group_outcomes(RunFolder(source), source_step, config, set(wanted))
            found += [(wanted[group], outcomes) for group, outcomes in computed.items()]
        return found


def _order_groups(config: RunConfig, groups: Sequence[StoredGroup]) -> tuple[Sequence[StoredGroup], Order]:
    """Return groups with their places or weights, those of weight 0 left out, and the order in which a step draws them.

    Raises:
        ConfigError: retrain.order_by or retrain.weight is wrong, or both are given.
    """
    order_by, weight = config.retrain.order_by, config.retrain.weight
    if order_by and weight:
        raise ConfigError("retrain.order_by", order_by, "give either an order or retrain.weight")
    if not order_by and not weight:
        return groups, "random"
    frames = RunFrames(list(map(find_run, config.retrain.sources)), config.retrain.scores)
    locations = {each.absolute: each.location for each in frames.folders}
    if order_by:
        places = frames.order_groups("retrain.order_by", order_by)
        placed = [(each, places[locations[each.source], each.step, each.group]) for each in groups]
        return [replace(each, place=place) for each, place in placed], "place"
    weights = frames.weigh_groups("retrain.weight", weight)
    weighed = [(each, weights[locations[each.source], each.step, each.group]) for each in groups]
    return [replace(each, weight=found) for each, found in weighed if found > 0], "weight"


def _group_outcomes(
    source: RunFolder, step: int, config: RunConfig, only: set[int] | None = None
) -> dict[int, tuple[GroupOutcome, ...]]:
    return recompute_advantages(source, step, config.retrain.scores, config.score, only=only)


def _all_outcomes(config: RunConfig) -> Iterator[tuple[StoredGroup, tuple[GroupOutcome, ...]]]:
    """Yield every group of the sources with its outcomes; a group that a run shares with its fork is yielded once."""
    seen: set[tuple[str, int, int]] = set()
    for source, steps in find_source_steps(config):
        manifest = read_manifest(source)
        for step, chosen in steps.items():
            for group, outcomes in _group_outcomes(source, step, config, chosen).items():
                if (one := (manifest.run_at_step(step), step, group)) not in seen:
                    seen.add(one)
                    yield StoredGroup(source.absolute, step, group), outcomes


async def store_draw(store: OpenRun, config: RunConfig, pool: GroupPool, step: int) -> Draw:
    """Draw the groups of a step, number them as groups of this run, and store the groups and then the batch.

    There is no plan, since nothing is sampled. Stored groups without a batch are replaced: an interrupted attempt may have
    drawn others, before the sources had more steps.
    """
    started, run = time.perf_counter(), store.manifest.run
    found = await asyncio.to_thread(pool.draw, config, step)
    writer, first = store.writer, step * config.rollout.groups_per_step
    outcomes: list[GroupOutcome] = []
    origins: dict[int, RolloutOrigin] = {}
    for number, (stored, of_group) in enumerate(found, first):
        outcomes += [replace(outcome, group=number) for outcome in of_group]
        origins[number] = RolloutOrigin(stored.source, stored.step)
    rows = group_rows(run, step, outcomes, time.perf_counter() - started)
    # A killed attempt may have stored groups without their batch.
    is_begun = (await asyncio.to_thread(read, store.folder, "groups", ["group"], step=step)).num_rows > 0
    await (writer.replace if is_begun else writer.append)("groups", rows, step=step)
    trained = compute_batch_advantages(config.score, outcomes)
    await writer.append("batches", batch_rows(run, step, trained, config.retrain.scores, origins), step=step)
    digest = await asyncio.to_thread(read_batch_digest, store.folder, step)
    return Draw(step, digest, _mean_reward(outcomes), _tokens(outcomes))


def _mean_reward(outcomes: Sequence[GroupOutcome]) -> float:
    trained = [outcome.survivors for outcome in outcomes if not outcome.reason]
    return fmean(fmean(survivor.reward for survivor in survivors) for survivors in trained)


def _tokens(outcomes: Sequence[GroupOutcome]) -> int:
    return sum(survivor.n_tokens for outcome in outcomes for survivor in outcome.survivors)
