"""Whether a model can be trained as asked for: found out of its structure, before its weights are read."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tasks.train.config import TrainConfig
from tasks.train.lora import add_adapters
from tasks.train.routing import RoutingReplay


def check_model(config: TrainConfig, folder: str) -> None:
    """Refuse adapters or a replay of routing that the model in this folder cannot have.

    Raises:
        ConfigError: names the setting and what the model has.
    """
    if not (config.lora.rank or config.replay_routing):
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    if config.replay_routing:
        RoutingReplay(model)
    if config.lora.rank:
        add_adapters(model, config.lora)
