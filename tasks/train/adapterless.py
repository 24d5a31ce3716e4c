"""The trained model with its adapters off: the model that they were added to, without memory of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from tasks.train.engine import Engine, Forward
from tasks.train.micro_batch import MicroBatch


class WithoutAdapters:
    """A policy whose log-probabilities are those of the model that adapters were added to.

    Attributes:
        folder: that model's.
        packer: makes its micro-batches.
    """

    def __init__(self, engine: Engine, folder: str) -> None:
        self.folder, self.packer, self._engine = folder, engine.packer, engine

    def forward(self, batch: MicroBatch) -> Forward:
        """What it says of the trained tokens of a micro-batch, by its own router's choice; under ZeRO-3 a collective."""
        with adapters_off(self._engine.model):
            return self._engine.forward(replace(batch, routing=None))


@contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[None]:
    """Compute meanwhile as if the model had no adapters."""
    layers = [each for each in model.modules() if isinstance(each, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
