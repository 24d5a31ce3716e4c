"""The reference policy in the trainer: a copy whose weights never change, or the policy without its adapters."""

from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from tasks.train.adapterless import WithoutAdapters
from tasks.train.config import TrainConfig
from tasks.train.deepspeed_library import deepspeed
from tasks.train.engine import Engine, Forward
from tasks.train.layout import Packer, choose_layout
from tasks.train.micro_batch import MicroBatch
from tasks.train.policy import Policy, load_policy

_ZERO_3 = 3


class FrozenPolicy:
    """A model without gradients and optimizer: whole on every rank, and under ZeRO-3 partitioned as the policy is.

    Attributes:
        folder: the model's.
        packer: makes its micro-batches.
    """

    def __init__(self, config: TrainConfig, folder: str, device: torch.device) -> None:
        self.folder = folder
        model = load_policy(folder, config.dtype)
        self.packer = Packer(config, choose_layout(model, config, device), device)
        self._policy = Policy(model, config.head_chunk_mib, is_partitioned=config.zero_stage == _ZERO_3)
        model.requires_grad_(False)
        self._model: Any = (
            _partitioned(config, model) if config.zero_stage == _ZERO_3 else torch.nn.Module.to(model, device)
        )

    def forward(self, batch: MicroBatch) -> Forward:
        """What it says of the trained tokens of a micro-batch; under ZeRO-3 a collective."""
        return Forward(*self._policy.values(self._model, batch, entropy_gradient=False))


Reference: TypeAlias = FrozenPolicy | WithoutAdapters


def load_reference(
    config: TrainConfig, engine: Engine, start_model: str, loaded: FrozenPolicy | None = None
) -> Reference | None:
    """The frozen model, if `train.kl.reference` asks for one: `train.kl.model`, or the start model.

    With adapters the start model is there already, so that it takes no copy.

    Args:
        config: settings of training.
        engine: the policy.
        start_model: folder of the model that the policy began as.
        loaded: the copy that is there, which stays when it is of the same folder.

    Raises:
        ConfigError: there is no such model.
    """
    if config.kl.reference != "frozen":
        return None
    if config.lora.rank and not config.kl.model:
        return WithoutAdapters(engine, start_model)
    folder = config.kl.model or start_model
    if loaded is not None and loaded.folder == folder:
        return loaded
    return FrozenPolicy(config, folder, engine.device)


def _partitioned(config: TrainConfig, model: PreTrainedModel) -> Any:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": config.dtype == "bfloat16"},
        "zero_optimization": {"stage": _ZERO_3},
        "steps_per_print": None,
    }
    engine = deepspeed.initialize(model=model, config=settings)[0]
    engine.eval()
    return engine
