"""Weights from a sender to a real vLLM server, its log-probabilities compared with the model's."""

import shutil
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from rollmill.tasks.errors import SyncError
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.sync.broadcast import create_prefix
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.train.config import LoraConfig
from tests.stubs.one_server_sync import send_to_server
from tests.stubs.parity import FLOAT32_NATS, largest_difference

pytestmark = pytest.mark.service

SYNC = SyncConfig(timeout_s=60.0)


async def send_weights(source, client, version: str, mode: str = "keep") -> Any:
    """Send over new links."""
    config = SYNC.model_copy(update={"mode": mode})
    return await send_to_server(source, client, version, config, create_prefix())


@pytest.fixture
async def client(vllm_server, use_repairs) -> AsyncIterator[VllmClient]:
    async with VllmClient(vllm_server.url, vllm_server.config) as client:
        await use_repairs(client)
        yield client


@pytest.fixture
async def expert_client(expert_server, use_repairs) -> AsyncIterator[VllmClient]:
    async with VllmClient(expert_server.url, expert_server.config) as client:
        await use_repairs(client)
        yield client


async def test_a_server_computes_with_the_weights_it_was_sent(client, vllm_server, source_of, sequences):
    source = source_of(vllm_server.model)
    for version in ("run:1:1", "run:1:2"):
        source.change(seed=int(version[-1]))
        assert await largest_difference(source, client, sequences, version) > FLOAT32_NATS
        await send_weights(source, client, version)
        assert await largest_difference(source, client, sequences, version) <= 1e-4
        assert await client.version() == version


async def test_a_server_joins_one_trainer_after_another(client, vllm_server, source_of, sequences):
    for incarnation in (1, 2):
        source = source_of(vllm_server.model)
        source.change(seed=10 + incarnation)
        await send_weights(source, client, f"run:{incarnation}:0")
        assert await largest_difference(source, client, sequences, f"run:{incarnation}:0") <= 1e-4


async def test_a_tied_head_is_stale_without_its_repair(
    client, vllm_server, source_of, sequences, use_repairs
):
    source = source_of(vllm_server.model)
    assert source.model.config.tie_word_embeddings
    source.change(seed=20)
    await use_repairs(client, ("repack_experts",))
    await send_weights(source, client, "run:1:1")
    assert await largest_difference(source, client, sequences, "run:1:1") > 0.1
    await use_repairs(client)
    await send_weights(source, client, "run:1:1")
    assert await largest_difference(source, client, sequences, "run:1:1") <= 1e-4


async def test_experts_are_stale_without_their_repair(
    expert_client, expert_server, source_of, sequences, use_repairs
):
    source, client = source_of(expert_server.model), expert_client
    source.change(seed=30)
    await use_repairs(client, ("repack_heads",))
    await send_weights(source, client, "run:1:1")
    assert await largest_difference(source, client, sequences, "run:1:1") > 0.1
    await use_repairs(client)
    for version in ("run:1:2", "run:1:3"):
        source.change(seed=30 + int(version[-1]))
        await send_weights(source, client, version)
        assert await largest_difference(source, client, sequences, version) <= 1e-4


@pytest.mark.parametrize("send", ["adapters", "merged"])
async def test_a_server_computes_with_the_adapters_it_was_sent(
    client, vllm_server, adapter_source_of, sequences, send: str
):
    source = adapter_source_of(vllm_server.model, LoraConfig(rank=2, alpha=4.0, send=send))
    for version in ("run:1:1", "run:1:2"):
        source.change(seed=50 + int(version[-1]))
        assert await largest_difference(source, client, sequences, version) > FLOAT32_NATS
        stats = await send_weights(source, client, version)
        assert await largest_difference(source, client, sequences, version) <= 1e-4
        sizes = {
            is_adapter: sum(
                each.numel() * 4
                for name, each in source.model.named_parameters()
                if (".lora_" in name) == is_adapter
            )
            for is_adapter in (True, False)
        }
        assert stats.bytes >= sizes[send == "adapters"]
        assert (stats.bytes < sizes[False]) == (send == "adapters")


async def test_adapters_on_a_mixture_of_experts_arrive_alone(
    expert_client, expert_server, adapter_source_of, sequences
):
    source, client = adapter_source_of(expert_server.model, LoraConfig(rank=2)), expert_client
    for version in ("run:1:1", "run:1:2"):
        source.change(seed=60 + int(version[-1]))
        await send_weights(source, client, version)
        assert await largest_difference(source, client, sequences, version) <= 1e-4


async def test_a_server_without_the_start_model_refuses_to_take_adapters_alone(
    client, vllm_server, adapter_source_of, sequences, tmp_path
):
    moved = shutil.copytree(vllm_server.model, tmp_path / "moved")
    source = adapter_source_of(moved, LoraConfig(rank=2))
    shutil.rmtree(moved)
    with pytest.raises(SyncError, match=r"has no weights.*set train\.lora\.send=merged"):
        await send_weights(source, client, "run:1:1")


@pytest.mark.parametrize("fixture", ["vllm_server", "expert_server"])
async def test_copies_of_a_model_alternate_in_serving(request, source_of, sequences, use_repairs, fixture):
    server = request.getfixturevalue(fixture)
    source = source_of(server.model)
    async with VllmClient(server.url, server.config) as client:
        await use_repairs(client)
        for number, mode in enumerate(("second_copy", "second_copy", "keep", "second_copy")):
            source.change(seed=70 + number)
            answer = await send_weights(source, client, f"run:1:{number}", mode)
            assert await largest_difference(source, client, sequences, f"run:1:{number}") <= 1e-4
            assert min(answer.bytes, answer.received_s, answer.held_s) > 0


@pytest.mark.parametrize("mode", ["keep", "second_copy"])
async def test_requests_in_flight_continue_with_the_new_weights(
    client, vllm_server, source_of, sequences, under_load, mode: str
):
    old, new = source_of(vllm_server.model), source_of(vllm_server.model)
    new.change(seed=40)
    prompt = sequences[1]
    await send_weights(old, client, "run:1:1")
    async with under_load(client, prompt) as completions:
        await send_weights(new, client, "run:1:2", mode)
    across = [each for each in completions if len(each.version_spans) == 2]
    assert across
    for completion in across:
        (first, before), (switch, after) = completion.version_spans
        assert (first, before, after) == (0, "run:1:1", "run:1:2")
        whole = [*prompt.tolist(), *completion.token_ids.tolist()]
        expected = np.concatenate(
            [
                old.token_logprobs(whole)[len(prompt) - 1 :][:switch],
                new.token_logprobs(whole)[len(prompt) - 1 :][switch:],
            ]
        )
        assert np.abs(expected - completion.logprobs).max() <= 1e-3
