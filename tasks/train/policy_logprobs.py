"""Log-probabilities of known tokens: of the policy, of the policy before the step, and of the reference policy.

Those of a batch's rows are read where they are stored, and computed where they are not. `reference` is the policy that a
divergence is measured from; `trainer` is the policy itself before the step, against which probability ratios may be taken
instead of against the sampler's. What is computed is staged to be stored, so that a step that is applied again reads the same
numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from rollmill.tasks.errors import BatchRefusedError
from rollmill.tasks.observe.metrics import MetricTable, Reduced
from rollmill.tasks.observe.spans import span
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.logprob_rows import make_logprob_rows, scatter_to_trained
from rollmill.tasks.store.reader import read, read_chosen
from rollmill.tasks.store.rows import name_first
from rollmill.tasks.store.staged_rows import StagedRows, stage_rows
from rollmill.tasks.store.stored_batch import list_origins
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.deepspeed_engine import Engine, Forward
from rollmill.tasks.train.engine.reference_policy import Reference
from rollmill.tasks.train.packing.micro_batch import MicroBatch
from rollmill.tasks.train.packing.packer import Packer
from rollmill.tasks.train.rank_messages import all_gather_messages
from rollmill.tasks.train.samples import Samples, split_rows
from rollmill.tasks.train.service.commands import StepRef

RowLogprobs: TypeAlias = dict[int, npt.NDArray[np.float32]]
"""[T] float32 nats of some rows by their number, NaN where loss_mask is False."""


class ForwardPolicy(Protocol):
    """A policy that computes log-probabilities: an Engine or a reference policy.

    Attributes:
        packer: plans and builds the policy's micro-batches.
    """

    packer: Packer

    def forward(self, batch: MicroBatch) -> Forward:
        """Log-probabilities of a micro-batch's trained tokens; may be a collective."""


def plan_single_rows(rows: Sequence[int], lengths: Sequence[int], n_ranks: int) -> list[list[list[int]]]:
    """Divide rows into micro-batches of one row each, longest rows first: for each of the W ranks equally many.

    Ranks without a row left get empty micro-batches.

    Example: rows 0, 1 and 2 of 5, 9 and 7 tokens on two ranks are [[[1], [0]], [[2], []]].
    """
    ordered = sorted(rows, key=lambda row: (-lengths[row], row))
    n_each = -(-len(ordered) // n_ranks)
    shares = [[[row] for row in ordered[rank::n_ranks]] for rank in range(n_ranks)]
    return [share + [[]] * (n_each - len(share)) for share in shares]


@torch.no_grad()
def compute_row_logprobs(policy: ForwardPolicy, samples: Samples, plan: Sequence[list[int]]) -> RowLogprobs:
    """Compute [T] float32 log-probabilities in nats of this rank's rows under a policy, by row number.

    The distributions have each row's sampling temperature; values of tokens that are not trained are NaN.

    Args:
        policy: the policy; its forward pass may be a collective.
        samples: rows of a batch, or of a part of it.
        plan: this rank's micro-batches, as row numbers; every rank has equally many.
    """
    envs, found = sorted(set(samples.envs)), {}
    for rows in plan:
        batch = policy.packer.micro_batch(samples, rows, envs)
        logprobs = policy.forward(batch).logprobs.float().cpu().numpy()
        for row, values in samples.split_by_row(rows, logprobs).items():
            found[row] = scatter_to_trained(samples.loss_masks[row], values)
    return found


def gather_rows(found: RowLogprobs) -> RowLogprobs:
    """Merge the rows' log-probabilities of all ranks, on every rank; a collective."""
    shares = all_gather_messages(found, RowLogprobs)
    return {row: values for share in shares for row, values in share.items()}


OtherPolicy: TypeAlias = Literal["reference", "trainer"]
StoredLogprobs: TypeAlias = Mapping[OtherPolicy, Mapping[str, np.ndarray]]
"""[T] nats of trajectories by their id, NaN where loss_mask is False, for each policy that training needs."""


MissingLogprobs: TypeAlias = Mapping[OtherPolicy, list[int]]
"""Rows with a trained token whose log-probabilities are not stored, for each policy that training needs."""


def read_stored_logprobs(folder: str, step: int, ids: Sequence[str], config: TrainConfig) -> StoredLogprobs:
    """Read the stored log-probabilities of trajectories of a step by policy (reference, trainer), for those that training needs.

    Raises:
        ShardError: a shard cannot be read.
    """
    run = RunFolder(folder)
    found: dict[OtherPolicy, Mapping[str, np.ndarray]] = {}
    if config.kl.reference == "stored":
        found["reference"] = _read_teacher_logprobs(run, step, ids, config.kl.teacher)
    elif config.kl.reference != "none":
        found["reference"] = read_policy_logprobs(run, step, "reference", ids)
    if config.old_logprobs == "trainer":
        found["trainer"] = read_policy_logprobs(run, step, "trainer", ids)
    return found


def read_policy_logprobs(run: RunFolder, step: int, policy: str, ids: Sequence[str]) -> dict[str, np.ndarray]:
    """Read the stored log-probabilities of trajectories of a step under one policy: [T] nats by trajectory id.

    Raises:
        ShardError: a shard cannot be read.
    """
    columns = ["trajectory_id", "logprobs"]
    rows = read_chosen(run, "logprobs", ids, columns, policy=policy, step=step)
    return dict(zip(rows["trajectory_id"].to_pylist(), split_rows(rows["logprobs"]), strict=True))


def _read_teacher_logprobs(
    run: RunFolder, step: int, ids: Sequence[str], teacher: str
) -> dict[str, np.ndarray]:
    """Read a teacher's log-probabilities of trajectories of a step's batch from the runs that sampled them."""
    wanted, found = set(ids), dict[str, np.ndarray]()
    for origin, origin_step, of_origin in list_origins(run, step):
        if chosen := [each for each in of_origin if each in wanted]:
            found |= read_policy_logprobs(origin, origin_step, teacher, chosen)
    return found


def list_policy_logprobs(folder: str, step: int, policy: OtherPolicy) -> set[str]:
    """List the ids of the trajectories of a step that have stored log-probabilities under one policy.

    Raises:
        ShardError: a shard cannot be read.
    """
    rows = read(RunFolder(folder), "logprobs", ["trajectory_id"], policy=policy, step=step)
    return set(rows["trajectory_id"].to_pylist())


def check_stored_logprobs(samples: Samples, stored: StoredLogprobs) -> None:
    """Refuse stored log-probabilities that do not fit the rows' tokens.

    Raises:
        BatchRefusedError: names the trajectory and what is wrong.
    """
    for policy, by_id in stored.items():
        for name, mask in zip(samples.trajectory_ids, samples.loss_masks, strict=True):
            values = by_id.get(name)
            if values is not None and (len(values) != len(mask) or not np.isfinite(values[mask]).all()):
                raise BatchRefusedError(
                    f"trajectory {name}: the stored log-probabilities of policy={policy} are {len(values)} for "
                    f"{len(mask)} tokens, or one of a sampled token is not finite"
                )


def check_missing_logprobs(samples: Samples, missing: MissingLogprobs, config: TrainConfig) -> None:
    """Refuse a batch without all log-probabilities of a reference that the trainer cannot compute; BatchRefusedError names the trajectories."""
    origins = {
        "deployment": "the reference deployment (train.kl.urls) in logprobs/policy=reference",
        "stored": f"the teacher (train.kl.teacher) in logprobs/policy={config.kl.teacher} of their runs",
    }
    if (origin := origins.get(config.kl.reference)) and (rows := missing["reference"]):
        raise BatchRefusedError(
            f"{len(rows)} trajectories have no log-probabilities of {origin}: "
            f"{name_first(samples.trajectory_ids[row] for row in rows)}"
        )


class PolicyLogprobs:
    """Computes log-probabilities under the policy and its reference; every rank has one.

    Args:
        config: settings of training.
        engine: the trained policy.
        reference: the frozen reference model; None without one.

    Attributes:
        engine: the trained policy.
    """

    def __init__(self, config: TrainConfig, engine: Engine, reference: Reference | None) -> None:
        self.engine = engine
        self._config, self._reference = config, reference

    def complete(
        self,
        samples: Samples,
        stored: StoredLogprobs,
        missing: MissingLogprobs,
        place: StepRef,
        table: MetricTable,
    ) -> tuple[Samples, tuple[StagedRows, ...]]:
        """Add the log-probabilities of all policies that training needs to a batch; a collective.

        Those that are not stored are computed, and staged in files for the flow to store.

        Args:
            samples: the batch.
            stored: log-probabilities of those of its rows that this rank trains.
            missing: rows that have none; each is held by the rank of `plan`.
            place: run and step that computed ones are staged for.
            table: on rank 0, seconds and number of rows computed are added to it.

        Returns:
            The completed batch, and on rank 0 the rows that were staged.
        """
        columns: dict[OtherPolicy, list[np.ndarray]] = {}
        staged: list[StagedRows] = []
        for policy, by_id in stored.items():
            with span("recomputing") as computing:
                found = self._compute(policy, samples, missing[policy])
                staged += self._stage(policy, samples, found, place, place.step)
                found = {
                    row: by_id[name] for row, name in enumerate(samples.trajectory_ids) if name in by_id
                } | found
                # A row without a trained token is not computed.
                columns[policy] = [
                    found[row] if row in found else np.full(len(mask), np.nan, np.float32)
                    for row, mask in enumerate(samples.loss_masks)
                ]
            if dist.get_rank() == 0:
                table.add(f"train/{policy}_logprobs_s", Reduced("max", computing.duration_s))
                table.add(f"train/{policy}_logprobs_rows", Reduced("value", float(len(missing[policy]))))
        completed = replace(
            samples, reference_logprobs=columns.get("reference"), old_logprobs=columns.get("trainer")
        )
        return completed, tuple(staged)

    def compute_old(self, samples: Samples, place: StepRef, version: int) -> StagedRows | None:
        """Compute the policy's log-probabilities of all rows, and stage them in a file for the flow to store; a collective.

        Args:
            samples: the rows.
            place: run and step that they are staged for.
            version: the policy's version.

        Returns:
            The staged rows; None on other ranks than 0, and without rows to compute.
        """
        (trained,) = samples.split(1)
        made = self._stage("trainer", samples, self._compute("trainer", samples, trained), place, version)
        return next(iter(made), None)

    def compute_sequences(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """[B][T-1] log p(token i+1 | tokens 0..i) in nats, at temperature 1; a collective, in which each rank computes a share."""
        token_ids = [np.asarray(each, np.int64) for each in sequences]
        samples = Samples.from_tokens(token_ids, [np.arange(len(each)) > 0 for each in token_ids])
        (rows,) = samples.split(1)
        own = self.engine.packer.plan(samples, rows, self.engine.world_size)[dist.get_rank()]
        found = gather_rows(compute_row_logprobs(self.engine, samples, own))
        return [found[row][1:].tolist() if row in found else [] for row in range(len(sequences))]

    def plan(self, policy: OtherPolicy, samples: Samples, rows: list[int]) -> list[list[list[int]]]:
        """Divide rows whose log-probabilities are to be computed into micro-batches: for each of the W ranks equally many."""
        if policy == "trainer":
            # Row by row: a row's values must not depend on the other rows, which differ between recomputing
            # during scoring and recomputing after a restart.
            lengths = [samples.outline(row).n_tokens for row in range(len(samples.trajectory_ids))]
            return plan_single_rows(rows, lengths, self.engine.world_size)
        assert self._reference is not None, "missing rows of a deployment or a teacher are refused before"
        return self._reference.packer.plan(samples, rows, self.engine.world_size)

    def plan_missing(self, samples: Samples, missing: MissingLogprobs) -> list[list[list[list[int]]]]:
        """Plan the computation of what is missing: for each policy, and each of the W ranks, micro-batches of row numbers."""
        return [self.plan(policy, samples, rows) for policy, rows in missing.items() if rows]

    def _compute(self, policy: OtherPolicy, samples: Samples, rows: list[int]) -> RowLogprobs:
        if not rows:
            return {}
        own = self.plan(policy, samples, rows)[dist.get_rank()]
        model = self.engine if policy == "trainer" else self._reference
        assert model is not None, "missing rows of a deployment or a teacher are refused before"
        return gather_rows(compute_row_logprobs(model, samples, own))

    def _stage(
        self, policy: OtherPolicy, samples: Samples, found: RowLogprobs, place: StepRef, version: int
    ) -> list[StagedRows]:
        if not found or not place.stages_rows or dist.get_rank():
            return []
        rows = sorted(found)
        ids = [samples.trajectory_ids[row] for row in rows]
        model = f"{place.run}:{place.incarnation}:{version}"
        if policy == "reference":
            assert self._reference is not None, "its rows were computed"
            model = Path(self._reference.folder).name
        logprobs = [found[row] for row in rows]
        made = make_logprob_rows(place.run, place.step, [model] * len(rows), ids, logprobs)
        name = f"{policy}-step={place.step:06d}-{ids[0]}-{len(ids)}"
        folder = RunFolder(place.folder)
        return [stage_rows(folder, "logprobs", made, name, policy=policy, step=place.step)]
