"""What a real vLLM's log-probabilities are under each setting of the sampler, next to those of the distribution that is trained."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer
from rollmill.tasks.rollout.completions import PoolSampler
from rollmill.tasks.rollout.config import RolloutConfig, SamplingConfig
from rollmill.tasks.rollout.environment import Example, Message
from rollmill.tasks.rollout.episode import EpisodePlayer, SampledTokens
from rollmill.tasks.rollout.trajectory import TrajectoryRequest
from rollmill.tasks.serve.responses import Completion
from rollmill.tasks.serve.server_pool import ServerPool
from rollmill.tasks.serve.vllm_client import VllmClient

pytestmark = pytest.mark.service

PROMPT = np.array([5, 9, 40, 12, 9], np.int32)
TEMPERATURE = 0.8
N_COMPLETIONS, N_TOKENS = 24, 24
GENERATION_CONFIG = {
    "eos_token_id": 1,
    "do_sample": True,
    "top_p": 0.3,
    "top_k": 2,
    "repetition_penalty": 1.8,
}
"""Defaults of a model's authors, which vLLM's chat routes take: none of them may reach a rollout."""


@pytest.fixture(scope="module")
def model(tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(tied_model, tmp_path_factory.mktemp("sampled") / "model"))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    return folder


@pytest.fixture(scope="module")
def served(run_server: Callable[..., AbstractContextManager[Any]], model: Path) -> Iterator[Any]:
    with run_server(model) as served:
        yield served


@pytest.fixture
async def client(served: Any) -> AsyncIterator[VllmClient]:
    async with VllmClient(served.url, served.config) as client:
        yield client


@pytest.fixture(scope="module")
def compute_logits(model: Path) -> Callable[[Sequence[int]], np.ndarray]:
    """[T, V] float64 logits after each token of a sequence, by transformers, as the trainer computes them."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model)

    def compute(sequence: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            logits = policy(torch.tensor([list(sequence)])).logits[0]
        return np.asarray(logits.double().numpy())

    return compute


async def sample(client: VllmClient, sampling: SamplingConfig, n: int = N_COMPLETIONS) -> list[Completion]:
    return list(
        await asyncio.gather(
            *(
                client.generate(
                    PROMPT,
                    max_tokens=N_TOKENS,
                    temperature=TEMPERATURE,
                    seed=seed,
                    timeout_s=60.0,
                    further=sampling.parameters(),
                )
                for seed in range(n)
            )
        )
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def keep(logits: np.ndarray, is_kept: np.ndarray) -> np.ndarray:
    return np.where(is_kept, logits, -np.inf)


def process(logits: np.ndarray, said: Sequence[int], sampling: SamplingConfig) -> np.ndarray:
    """[V] log-probabilities that a token is sampled by after the completion `said` so far: a naive sampler."""
    logits = logits.copy()
    seen = sorted({*PROMPT.tolist(), *said})
    penalty = sampling.repetition_penalty
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    logits[sorted(set(said))] -= sampling.presence_penalty
    logits /= TEMPERATURE
    probabilities = np.exp(log_softmax(logits))
    logits = keep(logits, probabilities >= sampling.min_p * probabilities.max())
    if sampling.top_k:
        logits = keep(logits, logits >= np.sort(logits)[-sampling.top_k])
    order = np.argsort(-logits)
    probabilities = np.exp(log_softmax(logits))[order]
    before = np.cumsum(probabilities) - probabilities
    is_kept = np.zeros(len(logits), bool)
    is_kept[order] = before < sampling.top_p
    return log_softmax(keep(logits, is_kept))


def compare(
    completions: Sequence[Completion], compute_logits: Callable[..., np.ndarray], sampling: SamplingConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Log-probabilities of all tokens by the server, by the naive sampler, by the trained distribution; share of it that was left."""
    columns = []
    for each in completions:
        said = each.token_ids.tolist()
        logits = compute_logits([*PROMPT.tolist(), *said])[len(PROMPT) - 1 : -1]
        for i, token in enumerate(said):
            processed = process(logits[i], said[:i], sampling)
            trained = log_softmax(logits[i] / TEMPERATURE)
            left = np.exp(trained[np.isfinite(processed)]).sum()
            columns.append((each.logprobs[i], processed[token], trained[token], left))
    server, naive, trained, left = np.array(columns).T
    return server, naive, trained, left


async def test_by_default_the_server_samples_from_the_trained_distribution_whatever_the_models_own_defaults(
    client: VllmClient, compute_logits: Callable[..., np.ndarray]
) -> None:
    server, naive, trained, _ = compare(
        await sample(client, SamplingConfig()), compute_logits, SamplingConfig()
    )
    np.testing.assert_allclose(server, trained, atol=2e-4)
    np.testing.assert_allclose(naive, trained, atol=1e-9)


@pytest.mark.parametrize(
    "settings", [{"top_p": 0.7}, {"top_k": 6}, {"min_p": 0.2}, {"top_p": 0.8, "top_k": 9}]
)
async def test_of_a_cut_distribution_the_servers_logprobs_are_those_and_the_ratio_is_the_share_that_was_left(
    client: VllmClient, compute_logits: Callable[..., np.ndarray], settings: dict[str, Any]
) -> None:
    sampling = SamplingConfig(**settings)
    server, naive, trained, left = compare(await sample(client, sampling), compute_logits, sampling)
    np.testing.assert_allclose(server, naive, atol=2e-4)
    # What a loss without a correction would take for a change of the policy: all ratios are below 1, by a quarter or so.
    ratio = np.exp(trained - server)
    assert ratio.max() < 1.001
    assert ratio.mean() < 0.9
    # What train.importance multiplies by: exactly the probability that the trained distribution gives to the tokens left.
    np.testing.assert_allclose(ratio, left, atol=1e-3)


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.5}, {"presence_penalty": 1.2}])
async def test_of_penalties_the_servers_logprobs_have_them_and_the_ratio_undoes_them(
    client: VllmClient, compute_logits: Callable[..., np.ndarray], settings: dict[str, Any]
) -> None:
    sampling = SamplingConfig(**settings)
    server, naive, trained, left = compare(await sample(client, sampling), compute_logits, sampling)
    np.testing.assert_allclose(server, naive, atol=2e-4)
    np.testing.assert_allclose(left, 1.0)
    ratio = np.exp(trained - server)
    assert ratio.min() < 0.9
    assert ratio.max() > 1.1
    # The weighted mean over many tokens is 1, as it is of every distribution that leaves no token out.
    assert abs(ratio.mean() - 1.0) < 0.25


async def test_of_structured_output_the_servers_logprobs_are_those_of_the_tokens_that_its_form_allows(
    client: VllmClient, compute_logits: Callable[..., np.ndarray], model: Path
) -> None:
    sampling = SamplingConfig(structured_output='{"regex": "[0-9]{3}[+][0-9]{2}"}')
    tokenizer = ChatTokenizer.load(model)
    completions = await sample(client, sampling)
    assert {each.finish_reason for each in completions} == {"stop"}
    digits = tokenizer._ids("0123456789").tolist()
    allowed = [digits] * 3 + [tokenizer._ids("+").tolist()] + [digits] * 2 + [sorted(tokenizer.eos_ids)]
    for each in completions:
        assert re.fullmatch(r"[0-9]{3}[+][0-9]{2}", tokenizer.decode(each.token_ids))
        logits = compute_logits([*PROMPT.tolist(), *each.token_ids.tolist()])[len(PROMPT) - 1 : -1]
        for token, logprob, row, ids in zip(each.token_ids, each.logprobs, logits, allowed, strict=True):
            trained = log_softmax(row / TEMPERATURE)
            left = np.exp(trained[ids]).sum()
            assert np.exp(trained[token] - logprob) == pytest.approx(left, abs=1e-3)
            assert left < 0.9


async def test_the_comparison_after_a_sync_is_of_raw_logprobs_whatever_the_sampler(
    client: VllmClient, compute_logits: Callable[..., np.ndarray]
) -> None:
    """Both sides of the parity check are log softmax(logits), and so are the reference policy's of a deployment."""
    sampled = await sample(client, SamplingConfig(top_k=2, repetition_penalty=1.5), n=4)
    for each in sampled:
        sequence = np.concatenate([PROMPT, each.token_ids])
        logits = compute_logits(sequence.tolist())[:-1]
        raw = [log_softmax(row)[token] for row, token in zip(logits, sequence[1:], strict=True)]
        np.testing.assert_allclose(await client.prompt_logprobs(sequence), raw, atol=2e-4)


async def test_a_form_that_vllm_refuses_ends_the_start_with_the_settings_name(client: VllmClient) -> None:
    sampling = SamplingConfig(structured_output='{"grammar": "root ::= nowhere"}')
    with pytest.raises(ConfigError, match=r"rollout\.sampling = .*nowhere.*: vLLM refuses it: "):
        await client.warm_up(60.0, further=sampling.parameters())
    await client.warm_up(60.0, further=SamplingConfig(structured_output='{"choice": ["85"]}').parameters())


@pytest.mark.parametrize("n_characters", [1, 2])
async def test_a_completion_ends_with_the_tokens_of_its_stop_text_as_they_were_sampled(
    client: VllmClient, model: Path, n_characters: int
) -> None:
    whole = next(each for each in await sample(client, SamplingConfig()) if each.finish_reason == "length")
    ids = whole.token_ids.tolist()
    text = "".join(ChatTokenizer.load(model).pieces(ids))
    at = next(i for i in range(4, len(ids)) if len(set(text[i : i + n_characters]) & {"<", ">"}) == 0)
    stop = text[at : at + n_characters]
    end = text.index(stop) + n_characters
    ended = next(
        each
        for each in await sample(client, SamplingConfig(stop=(stop,)))
        if each.token_ids[:4].tolist() == ids[:4]
    )
    assert ended.finish_reason == "stop"
    assert ended.token_ids.tolist() == ids[: min(end, len(ids))]
    np.testing.assert_allclose(ended.logprobs, whole.logprobs[: len(ended.token_ids)], atol=1e-5)


async def test_a_special_token_can_be_a_stop_text(client: VllmClient) -> None:
    pad = 0
    whole = [each.token_ids.tolist() for each in await sample(client, SamplingConfig(), n=200)]
    ended = [each.token_ids.tolist() for each in await sample(client, SamplingConfig(stop=("<pad>",)), n=200)]
    cut = [(ids, short) for ids, short in zip(whole, ended, strict=True) if pad in ids[:-1]]
    assert cut
    for ids, short in cut:
        assert short == ids[: ids.index(pad) + 1]


class TwoTurns:
    """An environment that asks twice."""

    name, tools, stop = "two turns", (), ()

    def episode(self, example: Example, seed: int) -> "TwoTurns":
        return TwoTurns()

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        return (Message("user", "ab" if messages else "1+2"),) if len(messages) < 3 else ()

    async def close(self) -> dict[str, object]:
        return {}


class Keeping:
    """A sampler that keeps what another one got from the server."""

    def __init__(self, sampler: PoolSampler) -> None:
        self.sampler, self.turns = sampler, list[SampledTokens]()

    async def sample(self, *args: Any, **options: Any) -> SampledTokens:
        self.turns.append(await self.sampler.sample(*args, **options))
        return self.turns[-1]


async def test_a_trajectory_of_turns_that_stop_texts_ended_has_the_servers_tokens_bit_for_bit(
    client: VllmClient, model: Path
) -> None:
    await client.set_version("ab:1:0")
    tokenizer, pool = ChatTokenizer.load(model), ServerPool()
    pool.admit(client)
    stop = tuple("0123456789")
    config = RolloutConfig(max_completion_tokens=100, sampling=SamplingConfig(stop=stop))
    n_compared = 0
    for seed in range(20):
        sampler = Keeping(PoolSampler(pool, config, "ab", 60.0))
        player = EpisodePlayer(TwoTurns(), tokenizer, sampler, max_tokens=250, timeout_s=60.0)
        work = TrajectoryRequest("ab.0.0.0", 0, 0, 0, Example("0", {}), seed, 1.0)
        trajectory = await player.play(work)
        sampled = np.concatenate([each.token_ids for each in sampler.turns])
        assert trajectory.token_ids[trajectory.loss_mask].tolist() == sampled.tolist()
        logprobs = np.concatenate([each.logprobs for each in sampler.turns])
        assert trajectory.logprobs[trajectory.loss_mask].tobytes() == logprobs.tobytes()
        if [each.token_ids[-1] in tokenizer._ids("".join(stop)) for each in sampler.turns] == [True, True]:
            n_compared += 1
            said = [each.content for each in trajectory.messages if each.role == "assistant"]
            assert all(text.endswith(stop) for text in said)
            first, second = (each.token_ids.tolist() for each in sampler.turns)
            # The environment's reply follows the stop text at once: without a template no end of sequence is added.
            parts = [*tokenizer._ids("1+2"), *first, *tokenizer._ids("ab"), *second]
            assert trajectory.token_ids.tolist() == parts
    assert n_compared
