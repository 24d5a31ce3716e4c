"""Plans a model's micro-batches and builds their tensors."""

from collections.abc import Sequence

import torch

from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.packing.micro_batch import MicroBatch, build_micro_batch
from rollmill.tasks.train.packing.packing_plan import (
    Layout,
    RowNumbers,
    TokenBudget,
    pack_padded,
    pack_varlen,
)
from rollmill.tasks.train.packing.prefixes import group_by_prefix
from rollmill.tasks.train.samples import Samples

OVERHEAD_TOKENS = 64
"""Fixed cost of one more forward and backward pass, in tokens; padding is weighed against it."""


class Packer:
    """Plans a policy's micro-batches, and builds their tensors.

    Attributes:
        layout: padded: rows side by side as [B, T]; varlen: rows packed into one sequence.
    """

    def __init__(self, config: TrainConfig, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self._device = device
        self._budget = TokenBudget(config.micro_batch_tokens, OVERHEAD_TOKENS)

    def plan(self, samples: Samples, rows: Sequence[int], n_ranks: int) -> list[list[RowNumbers]]:
        """Divide rows into micro-batches: for each of the W ranks equally many lists of row numbers.

        Args:
            samples: the batch.
            rows: row numbers to divide; each row has a trained token.
            n_ranks: number of ranks, W.
        """
        if self.layout == "varlen":
            return pack_varlen(group_by_prefix(samples, rows), n_ranks, self._budget.tokens)
        outlines = {row: samples.outline(row) for row in rows}
        single = [row for row in rows if outlines[row].n_segments == 1]
        several = [row for row in rows if outlines[row].n_segments > 1]
        shares = pack_padded([outlines[row].n_tokens for row in single], n_ranks, self._budget)
        # A row of several segments is padded to as many rows, which have a micro-batch to themselves.
        sizes = [outlines[row].n_segments * outlines[row].longest for row in several]
        others = pack_padded(sizes, n_ranks, TokenBudget(1))
        return [
            [[single[place] for place in cut] for cut in share]
            + [[several[place] for place in cut] for cut in other]
            for share, other in zip(shares, others, strict=True)
        ]

    def micro_batch(self, samples: Samples, rows: RowNumbers, env_names: list[str]) -> MicroBatch:
        """Build the tensors of one micro-batch from its row numbers.

        Args:
            samples: the batch.
            rows: the micro-batch's row numbers, from `plan`.
            env_names: the batch's environments, sorted.
        """
        return build_micro_batch(samples, rows, env_names, self._device, self.layout)
