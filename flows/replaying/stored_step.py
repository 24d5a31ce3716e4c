"""A stored step for its phases to be run again: what they need of its rows, and runs of their own to write to."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flows.config import RunConfig
from flows.looking.trajectories import check_sampled
from tasks.errors import ConfigError
from tasks.score.stored import group_sizes
from tasks.store.filesystem import files_of
from tasks.store.fork import bring_partition
from tasks.store.layout import RunFolder
from tasks.store.manifest import Manifest, write_manifest
from tasks.store.partitions import stored_steps
from tasks.store.plan import group_numbers, read_plan
from tasks.store.reader import read
from tasks.store.rows import Rows, no_rows, rows_of, values
from tasks.store.step import GroupPlan, StoredStep, plan_step


@dataclass(frozen=True, slots=True)
class SampledStep:
    """What generation left of a step.

    Attributes:
        groups: as its plan has them, with all rollouts and nothing else done.
        beside: rows of other data sets that belong to rollouts, by trajectory id and data set.
        group_size: trajectories that were asked for of each group.
        n_tokens: sampled tokens, mean over its trajectories.
    """

    step: int
    group_size: int
    groups: Sequence[GroupPlan]
    beside: Mapping[str, Mapping[str, Rows]]
    n_tokens: float

    @classmethod
    def read(cls, folder: RunFolder, manifest: Manifest, config: RunConfig, step: int) -> "SampledStep":
        """Read a step of a run.

        Raises:
            ConfigError: the run has no such step, or has not collected all of it.
            ShardError: rows are gone that were stored, or cannot be read.
        """
        check_step(folder, manifest, step)
        size = max(group_sizes(folder, step).values(), default=config.rollout.group_size)
        numbers = group_numbers(read_plan(folder, step))
        there = StoredStep.read(folder, step, scorer="none@0")
        plan_step(numbers, size, there)  # says which rows are gone
        sampled = plan_step(numbers, size, StoredStep(there.rollouts, no_rows("scores"), frozenset()))
        if sampled.to_sample:
            remedy = (
                f"{len(sampled.to_sample)} of its trajectories are not sampled yet; give a step that is done"
            )
            raise ConfigError("--step", step, remedy)
        tokens = [int(str(each)) for each in values(there.rollouts, "n_completion_tokens")]
        beside = _by_trajectory(
            {
                name: rows_of(read(folder, name, step=step))
                for name in ("routing",)
                if _has(folder, name, step)
            }
        )
        return cls(step, size, sampled.groups, beside, sum(tokens) / max(1, len(tokens)))


def check_step(folder: RunFolder, manifest: Manifest, step: int) -> None:
    """ConfigError when a run has no such step, or one whose batch is not stored; names those that there are."""
    check_sampled(folder)
    planned, batches = stored_steps(folder, "plans"), stored_steps(folder, "batches")
    done = batches if manifest.trains else stored_steps(folder, "groups")
    there_are = f"steps {done[0]} to {done[-1]} are done" if done else "no step is done yet"
    if step not in planned:
        raise ConfigError("--step", step, f"{folder.location} has no such step; {there_are}")
    if step not in done:
        what = "batch" if manifest.trains else "groups"
        raise ConfigError("--step", step, f"{folder.location} has stored no {what} of it yet; {there_are}")


def copy_for(source: RunFolder, manifest: Manifest, config: RunConfig, step: int, name: str) -> None:
    """Make a run below `config.store.root`, with the same id, for what comes after a step's generation.

    Raises:
        StoreError: something could not be read or written.
    """
    folder = RunFolder(f"{config.store.root}/{name}")
    Path(folder.location).mkdir(parents=True)
    folder.tmp.mkdir()
    files = files_of(folder)
    write_manifest(files, replace(manifest, config=config.model_dump(mode="json"), status="running"), None)
    bring_partition(source, folder, "plans", step=step)
    for policy in _asked_beside_generation(config):
        bring_partition(source, folder, "logprobs", policy=policy, step=step)


def _has(folder: RunFolder, dataset: str, step: int) -> bool:
    return step in stored_steps(folder, dataset)


def _by_trajectory(datasets: Mapping[str, Rows]) -> Mapping[str, Mapping[str, Rows]]:
    found: defaultdict[str, dict[str, Rows]] = defaultdict(dict)
    for name, rows in datasets.items():
        for place, trajectory in enumerate(values(rows, "trajectory_id")):
            found[str(trajectory)][name] = rows.slice(place, 1)
    return found


def _asked_beside_generation(config: RunConfig) -> list[str]:
    """The policies whose log-probabilities are there when a step's generation is over."""
    is_there = {
        "reference": config.train.kl.reference == "deployment",
        "trainer": config.train.behaviour == "recomputed",
    }
    return [policy for policy, there in is_there.items() if there]
