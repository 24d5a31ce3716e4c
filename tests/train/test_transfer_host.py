"""Where a trainer's ranks and the servers meet, and how far their transfer is."""

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import NamedTuple

import pytest
from torch.distributed import HashStore
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.service.launch import ServiceConfig
from rollmill.tasks.train.weight_transfer import SendProgress, WeightTransfer


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


class EndingStore(HashStore):  # type: ignore[misc]  # torch has no types of it
    """A store in which something happens after the next question for a key."""

    def __init__(self) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=1))
        self.after_check: Callable[[], object] = list

    def check(self, keys: list[str]) -> bool:
        found = bool(super().check(keys))
        self.after_check()
        return found


def test_a_transfer_that_ends_while_its_progress_is_read_keeps_nobody_waiting() -> None:
    store = EndingStore()
    progress = SendProgress(store, 0, 1, every_s=0.0)
    with ExitStack() as transfer:
        transfer.enter_context(progress.report_periodically(lambda: {"http://a": 5}))
        while not progress.total():
            pass
        store.after_check = transfer.close
        assert progress.total() in ({}, {"http://a": 5})
    assert progress.total() == {}
