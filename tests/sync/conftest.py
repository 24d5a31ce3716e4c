"""A trainer's part in a sync, played in the test's process: a transformers model and the real sender."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollmill.tasks.serve.responses import Completion
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.sync.weight_messages import SendResult, SendTarget, WeightOffer
from rollmill.tasks.train.config import LoraConfig, TrainConfig
from rollmill.tasks.train.engine.lora import add_adapters
from rollmill.tasks.train.engine.policy_model import load_policy
from rollmill.tasks.train.service.launch import ServiceConfig
from rollmill.tasks.train.weight_transfer import WeightTransfer

SYNC = SyncConfig(timeout_s=60.0)
BUCKET_BYTES = 1 << 20
REPAIRS = ("repack_heads", "repack_experts")
UNDER_WAY = 16


class Loaded(NamedTuple):
    """What a Transfer asks of an engine."""

    model: PreTrainedModel


class ModelSource:
    """A WeightSource: weights and log-probabilities of one transformers model, by one rank's end of the transfer."""

    lora = LoraConfig()

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        config = ServiceConfig(
            train=TrainConfig(lora=self.lora), sync=SYNC, bucket_bytes=BUCKET_BYTES, port=0, log_dir=""
        )
        self._transfer = WeightTransfer(config, 0, 1)
        self._transfer.prepare(Loaded(self.model))

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

    async def offer(self) -> WeightOffer:
        return self._transfer.offer()

    async def send(self, targets: Sequence[SendTarget], report: Any, every_s: float) -> list[SendResult]:
        return await asyncio.to_thread(self._transfer.send, Loaded(self.model), list(targets))

    async def stop_sending(self, target: SendTarget) -> None:
        self._transfer.stop_sending(target.prefix)

    async def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        return [self.token_logprobs(sequence).tolist() for sequence in sequences]


class AdapterSource(ModelSource):
    """A trainer with low-rank adapters on a model folder, and the trainer's own end of the transfer."""

    def __init__(self, folder: Path, lora: LoraConfig) -> None:
        model = load_policy(str(folder), "float32")
        add_adapters(model, lora)
        self.lora = lora
        super().__init__(model)

    def change(self, seed: int) -> None:
        """Other adapters, all of them."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3


@pytest.fixture(scope="session")
def expert_model(save_tiny: Callable[..., Path]) -> Path:
    """A mixture of experts whose head is not tied to the embedding."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
    return save_tiny(Qwen3MoeForCausalLM, Qwen3MoeConfig, tie_word_embeddings=False, **experts)


@pytest.fixture(scope="session")
def expert_server(
    run_server: Callable[[Path], AbstractContextManager[Any]], expert_model: Path
) -> Iterator[Any]:
    with run_server(expert_model) as served:
        yield served


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


@asynccontextmanager
async def requests_under_way(client: VllmClient, prompt: np.ndarray) -> AsyncIterator[list[Completion]]:
    """Keep requests under way, from when all have begun; what each of them gave, once this has ended."""
    completions, is_over, begun = list[Completion](), asyncio.Event(), asyncio.Barrier(UNDER_WAY + 1)

    async def sample(seed: int, max_tokens: int) -> None:
        sampling = {"temperature": 1.0, "timeout_s": SYNC.timeout_s, "max_tokens": max_tokens}
        completions.append(await client.generate(prompt, seed=seed, **sampling))

    async def keep_sampling(first: int) -> None:
        await sample(first, 1)
        await begun.wait()
        while not is_over.is_set():
            await sample(first + len(completions), 200)

    async with asyncio.TaskGroup() as group:
        for each in range(UNDER_WAY):
            group.create_task(keep_sampling(1000 * each))
        await begun.wait()
        await sample(0, 8)  # in the same batches: they have begun
        yield completions
        is_over.set()


@pytest.fixture
def under_load() -> Callable[[VllmClient, np.ndarray], AbstractAsyncContextManager[list[Completion]]]:
    """Requests that run meanwhile."""
    return requests_under_way
