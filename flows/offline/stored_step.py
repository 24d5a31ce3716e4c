"""A stored step as its rollouts left it, and temporary runs in which its later phases run again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rollmill.flows.configuration.config import RunConfig
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.trajectory_table import check_has_rollouts
from rollmill.tasks.score.stored_scores import read_group_sizes
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_steps, read
from rollmill.tasks.store.rows import Rows, column_values, no_rows, rows_from_table
from rollmill.tasks.store.run.fork_copy import copy_partition
from rollmill.tasks.store.run.group_ranges import group_numbers, read_plan, replayed_groups
from rollmill.tasks.store.run.manifest import Manifest, write_manifest
from rollmill.tasks.store.run.step_plan import GroupPlan, StoredStep, plan_step


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A stored step reduced to its rollouts, from which scores, advantages and a batch can be made again.

    Attributes:
        groups: the groups of the step's plan, with all rollouts, and without scores and outcomes.
        routing: rows of the data set `routing`, by trajectory id; empty if the step has none.
        group_size: planned trajectories of each group.
        n_tokens: mean sampled tokens of a trajectory.
    """

    step: int
    group_size: int
    groups: Sequence[GroupPlan]
    routing: Mapping[str, Rows]
    n_tokens: float

    @classmethod
    def read(cls, folder: RunFolder, manifest: Manifest, config: RunConfig, step: int) -> "SampledStep":
        """Read the rollouts of a finished step of a run, without their scores and outcomes.

        Raises:
            ConfigError: the run has no such step, or it is not finished.
            ShardError: stored rows are missing or unreadable.
        """
        check_step(folder, manifest, step)
        size = max(read_group_sizes(folder, step).values(), default=config.rollout.group_size)
        numbers = group_numbers(read_plan(folder, step))
        there = StoredStep.read(folder, step, scorer="none@0")
        # Raises ShardError with the missing rows.
        plan_step(numbers, size, there)
        # Scores and outcomes are left out: the phases make them again.
        sampled = plan_step(numbers, size, StoredStep(there.rollouts, no_rows("scores"), frozenset()))
        if sampled.to_sample:
            remedy = f"{len(sampled.to_sample)} of its trajectories are not sampled yet; give a finished step"
            raise ConfigError("--step", step, remedy)
        tokens = [int(str(each)) for each in column_values(there.rollouts, "n_completion_tokens")]
        return cls(step, size, sampled.groups, _read_routing(folder, step), sum(tokens) / max(1, len(tokens)))


def check_step(folder: RunFolder, manifest: Manifest, step: int) -> None:
    """Raise ConfigError, which names the finished steps, if a run does not have the step or it is not finished.

    A step is finished once its batch is stored; in a run that does not train, once its groups are.
    """
    check_has_rollouts(folder)
    planned, batches = list_steps(folder, "plans"), list_steps(folder, "batches")
    done = batches if manifest.trains else list_steps(folder, "groups")
    there_are = f"steps {done[0]} to {done[-1]} are done" if done else "no step is done yet"
    if step not in planned:
        raise ConfigError("--step", step, f"{folder.location} has no such step; {there_are}")
    if step not in done:
        what = "batch" if manifest.trains else "groups"
        raise ConfigError("--step", step, f"{folder.location} has stored no {what} of it yet; {there_are}")


def copy_step(source: RunFolder, manifest: Manifest, config: RunConfig, step: int, name: str) -> None:
    """Create a run below `config.store.root` with the id of `source`, and copy the step's plan and log-probabilities to it.

    Raises:
        StoreError: something could not be read or written.
    """
    folder = RunFolder(f"{config.store.root}/{name}")
    Path(folder.location).mkdir(parents=True)
    folder.tmp.mkdir()
    files = open_files(folder)
    write_manifest(files, replace(manifest, config=config.model_dump(mode="json"), status="running"), None)
    copy_partition(source, folder, "plans", step=step)
    # The batch has the stored groups of earlier steps too.
    for each in {
        stored.step for stored in replayed_groups(read_plan(source, step)).values() if not stored.source
    }:
        for dataset in ("rollouts", "scores", "groups"):
            copy_partition(source, folder, dataset, step=each)
    # Whose log-probabilities are stored by the end of a step's rollouts.
    if config.train.kl.reference == "deployment":
        copy_partition(source, folder, "logprobs", policy="reference", step=step)
    if config.train.old_logprobs == "trainer":
        copy_partition(source, folder, "logprobs", policy="trainer", step=step)


def _read_routing(folder: RunFolder, step: int) -> dict[str, Rows]:
    if step not in list_steps(folder, "routing"):
        return {}
    rows = rows_from_table(read(folder, "routing", step=step))
    ids = column_values(rows, "trajectory_id")
    return {str(trajectory): rows.slice(place, 1) for place, trajectory in enumerate(ids)}
