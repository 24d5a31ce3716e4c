"""What a rank does with the batch of a step: checks it, trains on it, and tells what came of it."""

from dataclasses import dataclass

import torch.distributed as dist

from tasks.errors import BatchRefusedError, RollmillError
from tasks.observe.loop import LoopMonitor
from tasks.observe.metrics import Metric, MetricTable, Reduced
from tasks.observe.spans import span
from tasks.store.deliveries import Delivery
from tasks.train.annotations import Annotations
from tasks.train.batch_rows import BatchRows
from tasks.train.checkpoints import Progress
from tasks.train.config import TrainConfig
from tasks.train.engine import Engine
from tasks.train.objective import Objective
from tasks.train.other_policies import OtherPolicies, check_stored
from tasks.train.protocol import StepResult, TrainStep
from tasks.train.samples import check_lengths, check_samples, n_trained_tokens
from tasks.train.step import StepTraining, reason_to_skip
from tasks.train.step_place import StepPlace
from tasks.train.timeline import Timeline, owned_seconds, rank_metrics


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a rank has loaded, and where it stands."""

    engine: Engine
    others: OtherPolicies
    progress: Progress


class BatchTraining:
    """Trains on batches; every rank has one.

    Args:
        config: settings of training.
        timeline: of this rank.
        monitor: of the control API's loop.
    """

    def __init__(self, config: TrainConfig, timeline: Timeline, monitor: LoopMonitor) -> None:
        self._config, self._timeline, self._monitor = config, timeline, monitor
        self._objective = Objective(config)

    def checked_rows(self, command: TrainStep, engine: Engine) -> BatchRows:
        """The rows of a step's batch, which all ranks read at the same time. A collective.

        Raises:
            BatchRefusedError: it is another batch than was asked for, or cannot be trained on; on every rank, as rank 0 found.
        """
        verdicts: list[RollmillError | None] = [None] * dist.get_world_size()
        with span("handing_over"):
            try:
                batch = self._checked(command, engine)
            except RollmillError as error:
                verdicts[dist.get_rank()] = error
            own = verdicts[dist.get_rank()]
            if len(verdicts) > 1:
                dist.all_gather_object(verdicts, own)
        if refusal := own or verdicts[0]:
            raise refusal
        return batch

    def _checked(self, command: TrainStep, engine: Engine) -> BatchRows:
        batch = BatchRows.read(command, self._config)
        if batch.digest != command.digest:
            raise BatchRefusedError(
                f"step {command.step}: the stored batch is {batch.digest}, asked was {command.digest}"
            )
        check_samples(batch.samples, needs_sampler=self._objective.needs_sampler)
        check_lengths(batch.samples, self._config.micro_batch_tokens)
        engine.check_routing(batch.samples)
        check_stored(batch.samples, batch.stored, self._config)
        return batch

    def train(
        self, command: TrainStep, batch: BatchRows, loaded: Loaded, place: StepPlace
    ) -> tuple[Progress, StepResult]:
        """Make the updates of a step, if there are any; where the rank stands then, and the step's result. A collective."""
        table, n_updates, deliveries = MetricTable(), loaded.progress.n_updates, tuple[Delivery, ...]()
        with span("packing"):
            reason = reason_to_skip(batch.samples, self._objective)
        if reason:
            n_dropped = self._config.epochs * n_trained_tokens(batch.samples)
            _tell(table, "train/dropped_tokens", n_dropped)
        else:
            training, deliveries = self._trained(command, batch, loaded, place)
            table, n_updates, reason = training.table, training.n_updates, training.reason
        _tell(table, "train/trajectories", len(batch.samples.trajectory_ids))
        metrics, duration_s = self._of_all_ranks(table)
        result = StepResult(command.step + 1, not reason, reason, metrics, duration_s, deliveries)
        return Progress(command.run, result.version, command.digest, n_updates, result), result

    def _trained(
        self, command: TrainStep, batch: BatchRows, loaded: Loaded, place: StepPlace
    ) -> tuple[StepTraining, tuple[Delivery, ...]]:
        """What came of a batch, and on rank 0 the rows that are to be stored."""
        engine, n_updates = loaded.engine, loaded.progress.n_updates
        samples, computed = loaded.others.complete(batch.samples, batch.stored, place)
        annotations = Annotations(samples) if self._is_annotated(command) else None
        training = StepTraining(self._config, engine, samples, n_updates, self._objective, annotations)
        training.run()
        if dist.get_rank() == 0:
            computed.measure(training.table)
        if annotations is None:
            return training, computed.deliveries
        with span("annotating"):
            return training, (*computed.deliveries, *annotations.hand_over(place))

    def _is_annotated(self, command: TrainStep) -> bool:
        every = self._config.annotate_every
        return every > 0 and command.step % every == 0

    def _of_all_ranks(self, table: MetricTable) -> tuple[list[Metric], float]:
        """Metrics and seconds of the step, on rank 0; a collective."""
        tables, whole = self._timeline.exchange(table), MetricTable()
        if not tables:
            return [], 0.0
        of_ranks = self._timeline.of_ranks()
        whole.join(tables)
        for name, value in rank_metrics(of_ranks):
            whole.add(name, value)
        return [*whole.metrics(), *self._monitor.report()], sum(owned_seconds(of_ranks[0]).values())


def _tell(table: MetricTable, name: str, value: float) -> None:
    """Add what every rank knows of the whole step, once."""
    if dist.get_rank() == 0:
        table.add(name, Reduced("value", float(value)))
