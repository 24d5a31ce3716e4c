"""What the trainer thought of each token of a batch, when it first saw it: rows of the data set `annotations`."""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from tasks.store.deliveries import Delivery, hand_over
from tasks.store.layout import RunFolder
from tasks.store.logprobs import at_trained
from tasks.store.rows import Rows
from tasks.store.schemas import batch_of, ragged, schema_of
from tasks.train.engine import Forward
from tasks.train.losses.token_loss import TokenLoss
from tasks.train.micro_batch import MicroBatch
from tasks.train.samples import Samples
from tasks.train.step_place import StepPlace

FIELDS = ("logprobs", "entropy", "ratio", "clipped")


@dataclass(slots=True)
class Annotations:
    """Collects, on one rank, the first pass over each row; later updates and epochs add nothing.

    Attributes:
        seen: the micro-batches' row numbers and [4, N] values of their trained tokens, one of FIELDS after another.
    """

    samples: Samples
    seen: list[tuple[list[int], torch.Tensor]] = field(default_factory=list)
    _rows: set[int] = field(default_factory=set)

    def add(self, batch: MicroBatch, forward: Forward, loss: TokenLoss) -> None:
        """Take up what one pass has computed; its rows are all new, or all seen before."""
        if self._rows.issuperset(batch.row_numbers):
            return
        self._rows.update(batch.row_numbers)
        values = (forward.logprobs, forward.entropies, loss.ratio, loss.clipped)
        self.seen.append((batch.row_numbers, torch.stack([each.detach().float() for each in values])))

    def hand_over(self, place: StepPlace) -> tuple[Delivery, ...]:
        """All ranks' annotations as one file of rank 0's, which names it; none of a step applied again. A collective."""
        if not place.hands_over:
            return ()
        own = self._by_row()
        shares = [own] * dist.get_world_size()
        if len(shares) > 1:
            dist.gather_object(own, shares if dist.get_rank() == 0 else None)
        if dist.get_rank():
            return ()
        by_row = {row: values for share in shares for row, values in share.items()}
        rows = annotation_rows(place.run, place.step, self.samples, by_row)
        name = f"annotations-step={place.step:06d}"
        return (hand_over(RunFolder(place.folder), "annotations", rows, name, step=place.step),)

    def _by_row(self) -> dict[int, np.ndarray]:
        """[4, N] values of each row's trained tokens, by its number."""
        found: dict[int, np.ndarray] = {}
        for numbers, values in self.seen:
            counts = [int(self.samples.loss_masks[row].sum()) for row in numbers]
            parts = np.split(values.cpu().numpy(), np.cumsum(counts)[:-1], axis=1)
            found |= dict(zip(numbers, parts, strict=True))
        return found


def annotation_rows(run: str, step: int, samples: Samples, by_row: dict[int, np.ndarray]) -> Rows:
    """Rows of the data set, in the batch's order, of [4, N] values of each row's trained tokens by its number."""
    numbers, schema = sorted(by_row), schema_of("annotations")
    columns: dict[str, object] = {
        "run": [run] * len(numbers),
        "step": [step] * len(numbers),
        "trajectory_id": [samples.trajectory_ids[row] for row in numbers],
    }
    for place, name in enumerate(FIELDS):
        tokens = [at_trained(samples.loss_masks[row], by_row[row][place]) for row in numbers]
        if name == "clipped":
            tokens = [each == 1.0 for each in tokens]
        columns[name] = ragged(tokens, schema.field(name).type)
    return batch_of("annotations", columns)
