"""A trainer's part in a sync, played in the test's process: a transformers model and the real sender."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tasks.serve.client import VllmClient
from tasks.sync.config import SyncConfig
from tasks.sync.sender import WeightSender
from tasks.train.config import LoraConfig, TrainConfig
from tasks.train.lora import add_adapters
from tasks.train.policy import load_policy
from tasks.train.protocol import ServiceConfig
from tasks.train.transfer import Transfer
from tasks.train.weights import named_weights, weight_metas

SYNC = SyncConfig(timeout_s=60.0)
BUCKET_BYTES = 10_000  # many buckets, and tensors across them, for these small models
REPAIRS = ("repack_heads", "repack_experts")


class ModelSource:
    """A WeightSource: weights and log-probabilities of one transformers model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._sender = WeightSender(SYNC.host, BUCKET_BYTES, SYNC.timeout_s)

    def change(self, seed: int) -> None:
        """Put other weights in place of all of them, of the same size as before."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(parameter.mean() + noise * (parameter.std(unbiased=False) + 0.01))

    def token_logprobs(self, sequence: list[int], temperature: float = 1.0) -> np.ndarray:
        """[T-1] log p(token i+1 | tokens 0..i) in nats."""
        ids = torch.tensor([sequence])
        with torch.no_grad():
            logits = self.model(ids).logits[0, :-1] / temperature
        return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()

    async def rendezvous(self) -> dict[str, Any]:
        return self._sender.rendezvous()

    async def connect(self, server: str, prefix: str) -> None:
        await asyncio.to_thread(self._sender.connect, server, prefix)

    async def weight_plan(self) -> dict[str, Any]:
        return self._sender.plan(weight_metas(self.model))

    async def send(self, servers: list[str]) -> dict[str, Any]:
        return await asyncio.to_thread(self._sender.send, servers, named_weights(self.model))

    async def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        return [self.token_logprobs(sequence).tolist() for sequence in sequences]


class Loaded(NamedTuple):
    """What a Transfer asks of an engine."""

    model: PreTrainedModel


class AdapterSource(ModelSource):
    """A trainer with low-rank adapters on a model folder, and the trainer's own end of the transfer."""

    def __init__(self, folder: Path, lora: LoraConfig) -> None:
        model = load_policy(str(folder), "float32")
        add_adapters(model, lora)
        super().__init__(model)
        self._transfer = Transfer(
            ServiceConfig(
                train=TrainConfig(lora=lora),
                bucket_bytes=BUCKET_BYTES,
                sync_host=SYNC.host,
                sync_timeout_s=SYNC.timeout_s,
                port=0,
                log_dir="",
            ),
            is_sender=True,
        )

    def change(self, seed: int) -> None:
        """Other adapters, all of them."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3

    async def rendezvous(self) -> dict[str, Any]:
        return self._transfer.rendezvous(Loaded(self.model))

    async def connect(self, server: str, prefix: str) -> None:
        await asyncio.to_thread(self._transfer.sender.connect, server, prefix)

    async def weight_plan(self) -> dict[str, Any]:
        return self._transfer.plan(Loaded(self.model))

    async def send(self, servers: list[str]) -> dict[str, Any]:
        return await asyncio.to_thread(self._transfer.send, Loaded(self.model), servers)


@pytest.fixture
def adapter_source_of() -> type[AdapterSource]:
    """The source that has adapters on a model folder."""
    return AdapterSource


@pytest.fixture
def source_of() -> Callable[[Path], ModelSource]:
    """The source that has a model folder's weights."""
    return lambda folder: ModelSource(AutoModelForCausalLM.from_pretrained(folder))


@pytest.fixture
def sequences() -> list[np.ndarray]:
    """Token ids to compare on."""
    random = np.random.default_rng(0)
    return [random.integers(2, 57, length).astype(np.int32) for length in (3, 17, 60)]


@pytest.fixture
def use_repairs() -> Callable[..., Any]:
    """Choose the repairs of a test's server, by name; without names: all."""

    async def chosen(client: VllmClient, names: tuple[str, ...] = REPAIRS) -> None:
        await client._call("POST", "/collective_rpc", {"method": "use_repairs", "args": list(names)})

    return chosen
