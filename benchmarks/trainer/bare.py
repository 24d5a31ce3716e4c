"""The same steps as a bare loop: what no trainer can do without."""

from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from benchmarks.trainer.ours import Gradient
from benchmarks.trainer.work import SETTINGS, TEMPERATURE, samples_of
from rollmill.tasks.train.config import TrainConfig

ROWS_AT_A_TIME = 4


class Bare:
    """Micro-batches of 4 rows by length, the head on completion tokens only, clipped ratios, AdamW."""

    def __init__(self, folder: Path, settings: dict[str, object]) -> None:
        self._config = TrainConfig.model_validate(SETTINGS | settings)
        self._samples = samples_of(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=self._config.lr, fused=True)
        self._n_trained = sum(int(mask.sum()) for mask in self._samples.loss_masks)
        self.gradient: Gradient = {}

    def step(self) -> None:
        """One optimizer update with the batch."""
        lengths = [len(row) for row in self._samples.token_ids]
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        for first in range(0, len(order), ROWS_AT_A_TIME):
            self._loss(order[first : first + ROWS_AT_A_TIME]).backward()
        if not self.gradient:
            named = self._model.named_parameters()
            self.gradient = {name: each.grad.clone() for name, each in named if each.grad is not None}
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _loss(self, rows: list[int]) -> torch.Tensor:
        """Of some rows, their share of the batch's mean over trained tokens."""
        samples = self._samples
        width = len(samples.token_ids[rows[0]])
        token_ids = np.zeros((len(rows), width), np.int64)
        for place, row in enumerate(rows):
            token_ids[place, : len(samples.token_ids[row])] = samples.token_ids[row]
        masks = [samples.loss_masks[row] for row in rows]
        before = [place * width + np.flatnonzero(mask) - 1 for place, mask in enumerate(masks)]
        chosen, targets, old, weights = (
            torch.from_numpy(np.concatenate(each))
            for each in (
                before,
                [samples.token_ids[row][mask] for row, mask in zip(rows, masks, strict=True)],
                [samples.logprobs[row][mask] for row, mask in zip(rows, masks, strict=True)],
                [np.full(mask.sum(), samples.advantages[row]) for row, mask in zip(rows, masks, strict=True)],
            )
        )
        hidden = self._model.model(input_ids=torch.from_numpy(token_ids), use_cache=False).last_hidden_state
        logits = self._model.lm_head(hidden.flatten(0, 1).index_select(0, chosen)) / TEMPERATURE
        ratio = torch.exp(-cross_entropy(logits, targets, reduction="none") - old)
        bounded = ratio.clamp(1.0 - self._config.clip_low, 1.0 + self._config.clip_high)
        return -torch.minimum(ratio * weights, bounded * weights).sum() / self._n_trained
