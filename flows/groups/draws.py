"""What the steps of a run that samples nothing train on: groups of other runs, drawn and judged anew."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean
from typing import Self

from flows.checks.offline import steps_of_sources
from flows.config import RunConfig
from flows.running.run import TrainingRun
from tasks.errors import ConfigError
from tasks.score.advantages.batch import settled
from tasks.score.outcome import GroupOutcome, Origin, batch_rows, group_rows
from tasks.score.stored import judged_groups
from tasks.store.batch import stored_digest
from tasks.store.draw import StoredGroup, drawn
from tasks.store.layout import RunFolder
from tasks.store.manifest import read_manifest
from tasks.store.reader import read


@dataclass(frozen=True, slots=True)
class Draw:
    """What one step trains on.

    Attributes:
        digest: of its batch, which is stored.
        reward: mean of the mean rewards of the groups, or parts of them, that are trained on, by the scores it goes by.
        tokens: sampled tokens of its trajectories.
    """

    step: int
    digest: str
    reward: float
    tokens: int


@dataclass(frozen=True, slots=True)
class GroupPool:
    """All groups that can be drawn.

    Attributes:
        left_out: groups by the reason why they cannot be trained on.
    """

    groups: tuple[StoredGroup, ...]
    left_out: Counter[str]

    @classmethod
    def read(cls, config: RunConfig) -> Self:
        """Judge every group of the sources, a step at a time; one that several of them have counts once.

        Raises:
            ConfigError: a source is no run, or has no such scores, or no group can be trained on.
        """
        groups: list[StoredGroup] = []
        left_out: Counter[str] = Counter()
        for group, outcomes in _all_judged(config):
            if any(not outcome.reason for outcome in outcomes):
                groups.append(group)
            else:
                left_out[outcomes[0].reason] += 1
        if not groups:
            why = ", ".join(f"{n} {reason}" for reason, n in left_out.items()) or "none is stored"
            remedy = f"no group of the sources can be trained on ({why})"
            raise ConfigError("retrain.sources", config.retrain.sources, remedy)
        return cls(tuple(groups), left_out)

    def draw(self, config: RunConfig, step: int) -> list[tuple[StoredGroup, tuple[GroupOutcome, ...]]]:
        """The groups of a step, with what became of them, in the order in which they lie."""
        chosen = drawn(
            self.groups, seed=config.seed, step=step, groups_per_step=config.retrain.groups_per_step
        )
        found = []
        for (source, source_step), of_step in groupby(sorted(chosen), lambda each: (each.source, each.step)):
            wanted = {each.group: each for each in of_step}
            judged = _judged(RunFolder(source), source_step, config, set(wanted))
            found += [(wanted[group], outcomes) for group, outcomes in judged.items()]
        return found


def _judged(
    source: RunFolder, step: int, config: RunConfig, only: set[int] | None = None
) -> dict[int, tuple[GroupOutcome, ...]]:
    return judged_groups(source, step, config.retrain.scores, config.score, only=only)


def _all_judged(config: RunConfig) -> Iterator[tuple[StoredGroup, tuple[GroupOutcome, ...]]]:
    """Every group of the sources; of one that a run and its fork, or a run given twice, have in common the first."""
    seen: set[tuple[str, int, int]] = set()
    for source, steps in steps_of_sources(config):
        manifest = read_manifest(source)
        for step in steps:
            for group, outcomes in _judged(source, step, config).items():
                if (one := (manifest.run_of(step), step, group)) not in seen:
                    seen.add(one)
                    yield StoredGroup(source.absolute, step, group), outcomes


async def store_draw(run: TrainingRun, pool: GroupPool, step: int) -> Draw:
    """Draw the groups of a step, number them as groups of this run, and store groups and batch, in that order.

    There is no plan, since nothing is sampled. Groups that are stored without a batch, which another draw may have
    chosen before the sources went on, give way to those of this draw.
    """
    started, config = time.perf_counter(), run.config
    found = await asyncio.to_thread(pool.draw, config, step)
    writer, first = run.store.writer, step * config.retrain.groups_per_step
    outcomes: list[GroupOutcome] = []
    origins: dict[int, Origin] = {}
    for number, (stored, of_group) in enumerate(found, first):
        outcomes += [replace(outcome, group=number) for outcome in of_group]
        origins[number] = Origin(stored.source, stored.step)
    rows = group_rows(run.id, step, outcomes, time.perf_counter() - started)
    is_begun = (await asyncio.to_thread(read, run.folder, "groups", ["group"], step=step)).num_rows > 0
    await (writer.replace if is_begun else writer.append)("groups", rows, step=step)
    trained = settled(config.score, outcomes)
    await writer.append(
        "batches", batch_rows(run.id, step, trained, config.retrain.scores, origins), step=step
    )
    digest = await asyncio.to_thread(stored_digest, run.folder, step)
    return Draw(step, digest, _mean_reward(outcomes), _tokens(outcomes))


def _mean_reward(outcomes: Sequence[GroupOutcome]) -> float:
    trained = [outcome.survivors for outcome in outcomes if not outcome.reason]
    return fmean(fmean(survivor.reward for survivor in survivors) for survivors in trained)


def _tokens(outcomes: Sequence[GroupOutcome]) -> int:
    return sum(survivor.n_tokens for outcome in outcomes for survivor in outcome.survivors)
