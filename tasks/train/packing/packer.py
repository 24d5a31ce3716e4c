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
        shares = pack_padded([samples.outline(row).n_tokens for row in rows], n_ranks, self._budget)
        return [[[rows[place] for place in cut] for cut in share] for share in shares]

    def micro_batch(self, samples: Samples, rows: RowNumbers, env_names: list[str]) -> MicroBatch:
        """Build the tensors of one micro-batch from its row numbers.

        Args:
            samples: the batch.
            rows: the micro-batch's row numbers, from `plan`.
            env_names: the batch's environments, sorted.
        """
        return build_micro_batch(samples, rows, env_names, self._device, self.layout)
