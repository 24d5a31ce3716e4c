"""What the steps of a run that samples nothing train on: groups of other runs, drawn and judged anew."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Self

from flows.config import RunConfig
from flows.folder import existing_run
from flows.run import TrainingRun
from tasks.errors import ConfigError
from tasks.score.outcome import GroupOutcome, Origin, batch_rows, group_rows
from tasks.score.stored import judged_groups
from tasks.store.batch import stored_digest
from tasks.store.draw import StoredGroup, drawn
from tasks.store.layout import RunFolder
from tasks.store.manifest import read_manifest
from tasks.store.partitions import stored_scorers
from tasks.store.reader import read
from tasks.store.resume import stored_batch_steps


@dataclass(frozen=True, slots=True)
class Draw:
    """What one step trains on.

    Attributes:
        digest: of its batch, which is stored.
        reward: mean of its groups' mean rewards, by the scores it goes by.
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
        sizes: trajectories asked for in a group (G), by source.
        left_out: groups by the reason why they cannot be trained on.
    """

    groups: tuple[StoredGroup, ...]
    sizes: dict[str, int]
    left_out: Counter[str]

    @classmethod
    def read(cls, config: RunConfig) -> Self:
        """Judge every group of the sources, a step at a time.

        Raises:
            ConfigError: a source is no run, or has no such scores, or no group can be trained on.
        """
        groups: list[StoredGroup] = []
        sizes: dict[str, int] = {}
        left_out: Counter[str] = Counter()
        for source in map(existing_run, config.retrain.sources):
            sizes[source.absolute] = _group_size(source)
            for step in _steps(source, config):
                for group, outcomes in _judged(source, step, config, sizes[source.absolute]).items():
                    if any(not outcome.reason for outcome in outcomes):
                        groups.append(StoredGroup(source.absolute, step, group))
                    else:
                        left_out[outcomes[0].reason] += 1
        if not groups:
            why = ", ".join(f"{n} {reason}" for reason, n in left_out.items()) or "none is stored"
            remedy = f"no group of the sources can be trained on ({why})"
            raise ConfigError("retrain.sources", config.retrain.sources, remedy)
        return cls(tuple(groups), sizes, left_out)

    def draw(self, config: RunConfig, step: int) -> list[tuple[StoredGroup, tuple[GroupOutcome, ...]]]:
        """The groups of a step, with what became of them, in the order in which they lie."""
        chosen = drawn(
            self.groups, seed=config.seed, step=step, groups_per_step=config.retrain.groups_per_step
        )
        found = []
        for (source, source_step), of_step in groupby(sorted(chosen), lambda each: (each.source, each.step)):
            wanted = {each.group: each for each in of_step}
            judged = _judged(RunFolder(source), source_step, config, self.sizes[source], set(wanted))
            found += [(wanted[group], outcomes) for group, outcomes in judged.items()]
        return found


def _judged(
    source: RunFolder, step: int, config: RunConfig, size: int, only: set[int] | None = None
) -> dict[int, tuple[GroupOutcome, ...]]:
    return judged_groups(source, step, config.retrain.scores, config.score, expected=size, only=only)


def _group_size(source: RunFolder) -> int:
    return int(read_manifest(source).config["rollout"]["group_size"])


def _steps(source: RunFolder, config: RunConfig) -> list[int]:
    """The steps of a source to draw from: those that it has trained on."""
    scores, first, last = config.retrain.scores, config.retrain.first_step, config.retrain.last_step
    if scores not in (there_are := stored_scorers(source)):
        remedy = f"{source.location} has no such scores, but {', '.join(there_are) or 'none'}; `rollmill rescore` makes them"
        raise ConfigError("retrain.scores", scores, remedy)
    return [step for step in stored_batch_steps(source) if first <= step and (last < 0 or step <= last)]


async def store_draw(run: TrainingRun, pool: GroupPool, step: int) -> Draw:
    """Draw the groups of a step, number them as groups of this run, and store groups and batch, in that order.

    There is no plan, since nothing is sampled.
    """
    started, config = time.perf_counter(), run.config
    found = await asyncio.to_thread(pool.draw, config, step)
    writer, first = run.store.writer, step * config.retrain.groups_per_step
    outcomes: list[GroupOutcome] = []
    origins: dict[int, Origin] = {}
    for number, (stored, of_group) in enumerate(found, first):
        outcomes += [replace(outcome, group=number) for outcome in of_group]
        origins[number] = Origin(stored.source, stored.step)
    if not (await asyncio.to_thread(read, run.folder, "groups", ["group"], step=step)).num_rows:
        rows = group_rows(run.id, step, outcomes, time.perf_counter() - started)
        await writer.append("groups", rows, step=step)
    await writer.append(
        "batches", batch_rows(run.id, step, outcomes, config.retrain.scores, origins), step=step
    )
    digest = await asyncio.to_thread(stored_digest, run.folder, step)
    return Draw(step, digest, _mean_reward(outcomes), _tokens(outcomes))


def _mean_reward(outcomes: Sequence[GroupOutcome]) -> float:
    rewards = [survivor.reward for outcome in outcomes for survivor in outcome.survivors]
    return sum(rewards) / len(rewards)


def _tokens(outcomes: Sequence[GroupOutcome]) -> int:
    return sum(survivor.n_tokens for outcome in outcomes for survivor in outcome.survivors)
