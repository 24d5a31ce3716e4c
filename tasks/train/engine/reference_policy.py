"""The reference policy in the trainer: a frozen copy of a model, or the policy with its adapters switched off."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from rollmill.tasks.store.model_folders import model_folder
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.deepspeed_engine import Engine, Forward
from rollmill.tasks.train.engine.partitioned_loading import load_trained
from rollmill.tasks.train.engine.policy_model import PolicyModel
from rollmill.tasks.train.engine.private_deepspeed import deepspeed, forget_model
from rollmill.tasks.train.engine.private_transformers import BaseTunerLayer
from rollmill.tasks.train.packing.layout import choose_layout
from rollmill.tasks.train.packing.micro_batch import MicroBatch
from rollmill.tasks.train.packing.packer import Packer


class BaseModelPolicy:
    """Reference policy that is the trained model with its adapters switched off, without a copy of its weights.

    Attributes:
        folder: folder of the base model.
        packer: plans and builds the model's micro-batches.
    """

    def __init__(self, engine: Engine, folder: str) -> None:
        self.folder, self.packer, self._engine = folder, engine.packer, engine

    def forward(self, batch: MicroBatch) -> Forward:
        """Compute log-probabilities of a micro-batch's trained tokens without adapters; under ZeRO-3 a collective.

        In a mixture of experts the model's own routers choose, not the stored experts.
        """
        # Stored experts are those of the policy with its adapters, which the start model may not choose.
        with disable_adapters(self._engine.model):
            return self._engine.forward(replace(batch, routing=None))


@contextmanager
def disable_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Switch off a model's adapters in the `with` block."""
    layers = [each for each in model.modules() if isinstance(each, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


_ZERO_3 = 3


class FrozenPolicy:
    """A frozen copy of a model: whole on every rank, or partitioned under ZeRO-3.

    Attributes:
        folder: folder of the model.
        packer: plans and builds the model's micro-batches.
    """

    def __init__(self, config: TrainConfig, folder: str, device: torch.device) -> None:
        self.folder = folder
        model = load_trained(config, folder)
        self.packer = Packer(config, choose_layout(model, config, device), device)
        self._policy = PolicyModel(
            model, is_partitioned=config.zero_stage == _ZERO_3, head_dtype=config.head_dtype
        )
        model.requires_grad_(False)
        self._model: Any = (
            _partition(config, model) if config.zero_stage == _ZERO_3 else torch.nn.Module.to(model, device)
        )

    def forward(self, batch: MicroBatch) -> Forward:
        """Log-probabilities of a micro-batch's trained tokens; under ZeRO-3 a collective."""
        return Forward(*self._policy.values(self._model, batch, entropy_gradient=False))

    def close(self) -> None:
        """Free the copy's memory, once nothing refers to it and garbage is collected."""
        # Otherwise it is a plain model, which nothing else knows.
        if hasattr(self._model, "destroy"):
            self._model.destroy()
            forget_model(self._model.module)


Reference: TypeAlias = FrozenPolicy | BaseModelPolicy


def reference_folder(config: TrainConfig, start_model: str) -> str:
    """Return the folder of a frozen reference model: `train.kl.model` or else the start model."""
    return str(model_folder(config.kl.model)) if config.kl.model else start_model


def load_reference(
    config: TrainConfig, engine: Engine, start_model: str, loaded: FrozenPolicy | None = None
) -> Reference | None:
    """Load the frozen reference model; None unless `train.kl.reference` is frozen.

    With adapters the start model is in memory already, so it is not copied.

    Args:
        config: settings of training.
        engine: the policy.
        start_model: folder of the model that training started from.
        loaded: an already loaded reference model, which is returned if it is of the same folder.

    Raises:
        ConfigError: there is no such model folder.
    """
    if config.kl.reference != "frozen":
        return None
    # The start model is in memory already, below the adapters.
    if config.lora.rank and not config.kl.model:
        return BaseModelPolicy(engine, start_model)
    folder = reference_folder(config, start_model)
    # The copy never changes, so that a later load of another version keeps it.
    if loaded is not None and loaded.folder == folder:
        return loaded
    return FrozenPolicy(config, folder, engine.device)


def _partition(config: TrainConfig, model: PreTrainedModel) -> Any:
    # DeepSpeed takes no configuration without a batch size, although nothing is trained here.
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": config.dtype == "bfloat16"},
        "zero_optimization": {"stage": _ZERO_3},
        "steps_per_print": None,
    }
    engine = deepspeed.initialize(model=model, config=settings)[0]
    engine.eval()
    return engine
