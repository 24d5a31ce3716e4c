"""Where a trainer's ranks and the servers meet."""

from typing import NamedTuple

import pytest
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.service.commands import ServiceConfig
from rollmill.tasks.train.weight_transfer import WeightTransfer


class Loaded(NamedTuple):
    """What a Transfer asks of an engine."""

    model: PreTrainedModel


@pytest.mark.parametrize("host", ["203.0.113.1", ""])
def test_an_address_of_another_machine_is_refused_with_what_to_set(host: str) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads))
    config = ServiceConfig(train=TrainConfig(), sync=SyncConfig(host=host), port=0, log_dir="")
    with pytest.raises(SyncError, match=r"cannot listen at sync\.host=.*; set sync\.host"):
        WeightTransfer(config, 0, 1).prepare(Loaded(model))  # type: ignore[arg-type]  # all that it asks for
