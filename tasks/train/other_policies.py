"""What other policies than the trained one say of a batch's rows: as it is stored, and computed where it is not.

`reference` is the policy that a divergence is measured from; `trainer` is the policy itself before the step, against
which probability ratios may be taken instead of against the sampler's. What is computed is handed over to be stored, so
that a step that is applied again reads the same numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch.distributed as dist

from tasks.errors import BatchRefusedError
from tasks.observe.metrics import MetricTable, Reduced
from tasks.observe.spans import span
from tasks.store.deliveries import Delivery, hand_over
from tasks.store.findings import named
from tasks.store.layout import RunFolder
from tasks.store.logprobs import at_trained, logprob_rows
from tasks.store.reader import read
from tasks.train.config import TrainConfig
from tasks.train.engine import Engine
from tasks.train.reference import Reference
from tasks.train.row_logprobs import ForwardPolicy, RowLogprobs, row_by_row, row_logprobs
from tasks.train.samples import Samples, arrays
from tasks.train.step_place import StepPlace

OtherPolicy: TypeAlias = Literal["reference", "trainer"]
StoredLogprobs: TypeAlias = Mapping[OtherPolicy, Mapping[str, np.ndarray]]
"""[T] nats of trajectories by their id, NaN where loss_mask is False, for each policy that training needs."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What was computed for a batch.

    Attributes:
        deliveries: on rank 0 the files to be stored.
        seconds: by policy.
        rows: how many, by policy.
    """

    deliveries: tuple[Delivery, ...]
    seconds: Mapping[OtherPolicy, float]
    rows: Mapping[OtherPolicy, int]

    def measure(self, table: MetricTable) -> None:
        """Add the seconds that training waited for it, and the rows."""
        for policy, seconds in self.seconds.items():
            table.add(f"train/{policy}_logprobs_s", Reduced("max", seconds))
            table.add(f"train/{policy}_logprobs_rows", Reduced("value", float(self.rows[policy])))


def needed(config: TrainConfig) -> tuple[OtherPolicy, ...]:
    """The other policies whose log-probabilities training needs."""
    reference: tuple[OtherPolicy, ...] = () if config.kl.reference == "none" else ("reference",)
    return (*reference, "trainer") if config.behaviour == "recomputed" else reference


def read_stored(folder: str, step: int, config: TrainConfig) -> StoredLogprobs:
    """What is stored of a step for the policies that training needs.

    Raises:
        ShardError: a shard cannot be read.
    """
    return {policy: stored_logprobs(folder, step, policy) for policy in needed(config)}


def stored_logprobs(folder: str, step: int, policy: OtherPolicy) -> dict[str, np.ndarray]:
    """[T] nats of the trajectories of a step that have a row of one policy, by their id.

    Raises:
        ShardError: a shard cannot be read.
    """
    rows = read(RunFolder(folder), "logprobs", ["trajectory_id", "logprobs"], policy=policy, step=step)
    return dict(zip(rows["trajectory_id"].to_pylist(), arrays(rows["logprobs"]), strict=True))


def check_stored(samples: Samples, stored: StoredLogprobs, config: TrainConfig) -> None:
    """Refuse stored log-probabilities that are not those of the rows' trained tokens, and a deployment's that lack rows.

    Raises:
        BatchRefusedError: names the trajectory and what is wrong.
    """
    for policy, by_id in stored.items():
        missing = []
        for name, mask in zip(samples.trajectory_ids, samples.loss_masks, strict=True):
            values = by_id.get(name)
            if values is None:
                missing += [name] if mask.any() else []
            elif len(values) != len(mask) or not np.isfinite(values[mask]).all():
                raise BatchRefusedError(
                    f"trajectory {name}: the stored log-probabilities of policy={policy} are {len(values)} for "
                    f"{len(mask)} tokens, or one of a sampled token is not finite"
                )
        if missing and policy == "reference" and config.kl.reference == "deployment":
            raise BatchRefusedError(
                f"{len(missing)} trajectories have no log-probabilities of the reference deployment (train.kl.urls) in "
                f"logprobs/policy=reference: {named(missing)}"
            )


class OtherPolicies:
    """Computes what is not stored; every rank has one.

    Args:
        config: settings of training.
        engine: the policy.
        reference: the frozen model; None without one.
    """

    def __init__(self, config: TrainConfig, engine: Engine, reference: Reference | None) -> None:
        self._config, self._engine, self._reference = config, engine, reference

    def complete(
        self, samples: Samples, stored: StoredLogprobs, place: StepPlace
    ) -> tuple[Samples, Computed]:
        """A batch with the log-probabilities of all policies that training needs; a collective.

        The reference's rows go through the model as a step's do, packed; the trainer's one by one, so that a row's are
        the same whatever else is computed.
        """
        columns: dict[OtherPolicy, list[np.ndarray]] = {}
        deliveries: list[Delivery] = []
        seconds: dict[OtherPolicy, float] = {}
        n_rows: dict[OtherPolicy, int] = {}
        (trained,) = samples.split(1)
        for policy, by_id in stored.items():
            missing = [row for row in trained if samples.trajectory_ids[row] not in by_id]
            with span("recomputing") as computing:
                found = self._compute(policy, samples, missing)
                deliveries += self._hand_over(policy, samples, found, place)
                columns[policy] = [
                    found[row] if row in found else _stored(by_id, samples, row)
                    for row in range(len(samples.trajectory_ids))
                ]
            seconds[policy], n_rows[policy] = computing.duration_s, len(missing)
        completed = replace(
            samples, reference_logprobs=columns.get("reference"), old_logprobs=columns.get("trainer")
        )
        return completed, Computed(tuple(deliveries), seconds, n_rows)

    def score(self, samples: Samples, place: StepPlace) -> Delivery | None:
        """Compute and hand over the trainer's log-probabilities of rows; None on other ranks than 0, and without rows."""
        (trained,) = samples.split(1)
        made = self._hand_over("trainer", samples, self._compute("trainer", samples, trained), place)
        return made[0] if made else None

    def _compute(self, policy: OtherPolicy, samples: Samples, rows: list[int]) -> RowLogprobs:
        if not rows:
            return {}
        lengths, n_ranks = [len(each) for each in samples.token_ids], self._engine.world_size
        speaker: ForwardPolicy = self._engine
        if policy == "trainer":
            plan = row_by_row(rows, lengths, n_ranks)[dist.get_rank()]
        else:
            assert self._reference is not None, "a deployment's missing rows are refused before"
            speaker = self._reference
            plan = speaker.packer.plan(samples, rows, n_ranks)[dist.get_rank()]
        return row_logprobs(speaker, samples, plan)

    def _hand_over(
        self, policy: OtherPolicy, samples: Samples, found: RowLogprobs, place: StepPlace
    ) -> list[Delivery]:
        if not found or not place.hands_over or dist.get_rank():
            return []
        rows = sorted(found)
        ids = [samples.trajectory_ids[row] for row in rows]
        models, logprobs = [self._name(policy, place)] * len(rows), [found[row] for row in rows]
        made = logprob_rows(place.run, place.step, models, ids, logprobs)
        name = f"{policy}-step={place.step:06d}-{ids[0]}-{len(ids)}"
        folder = RunFolder(place.folder)
        return [hand_over(folder, "logprobs", made, name, policy=policy, step=place.step)]

    def _name(self, policy: OtherPolicy, place: StepPlace) -> str:
        if policy == "trainer":
            return f"{place.run}:{place.incarnation}:{place.step}"
        assert self._reference is not None
        return Path(self._reference.folder).name


def _stored(by_id: Mapping[str, np.ndarray], samples: Samples, row: int) -> np.ndarray:
    """What is stored of a row; NaN of one without a trained token, which nobody computes."""
    nothing = at_trained(np.zeros(len(samples.loss_masks[row]), bool), np.empty(0, np.float32))
    return by_id.get(samples.trajectory_ids[row], nothing)
