"""A reward model served by a real vLLM: what it gives is what the model says."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tasks.score.config import ScoreConfig
from tasks.score.scoring import Scoring
from tasks.serve import vllm
from tasks.serve.client import VllmClient
from tasks.serve.config import ServeConfig
from tasks.serve.process import LaunchedProcess, free_port
from tasks.store.rows import Rows, values

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
REWARD = 1


@pytest.fixture(scope="module")
def reward_model(save_tiny: Callable[..., Path]) -> Path:
    """A classifier of two outputs."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    folder = save_tiny(Qwen2ForSequenceClassification, Qwen2Config, num_labels=2, pad_token_id=0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def url(reward_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config, port = ServeConfig(), free_port()
    command = [
        config.python,
        *("-m", "vllm.entrypoints.openai.api_server", "--runner", "pooling"),
        *("--model", str(reward_model), "--served-model-name", "reward"),
        *("--host", vllm.LOOPBACK, "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "128", "--enforce-eager"),
    ]
    log = tmp_path_factory.mktemp("reward-model") / "vllm.log"
    process = LaunchedProcess.start(
        "reward model", command, log=log, env=vllm.environment(config), stop_grace_s=2.0
    )
    try:
        address = f"http://{vllm.LOOPBACK}:{port}"
        asyncio.run(healthy(address, config, process))
        yield address
    finally:
        process.stop_now()


async def healthy(address: str, config: ServeConfig, process: LaunchedProcess) -> None:
    async with VllmClient(address, config) as client:
        await client.wait_until_healthy(300.0, process)


@pytest.mark.service
async def test_the_reward_is_the_models_own_output_for_the_conversation(
    url: str, reward_model: Path, rollouts: Callable[[Sequence[str]], Rows]
) -> None:
    settings: dict[str, Any] = {"scorer": "reward_model", "reward_model": {"url": url, "output": REWARD}}
    answers = ["2", "[1+1=2]2", "3"]
    async with Scoring(ScoreConfig.model_validate(settings), "run") as scoring:
        scores = await scoring.score(rollouts(answers), step=0)
    assert values(scores, "error") == ["", "", ""]
    expected = [logits(reward_model, f"1+1={answer}")[REWARD] for answer in answers]
    assert values(scores, "reward") == pytest.approx(expected, abs=1e-4)


def logits(folder: Path, text: str) -> list[float]:
    import torch
    from tokenizers import Tokenizer
    from transformers import Qwen2ForSequenceClassification

    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    model = Qwen2ForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].tolist()
