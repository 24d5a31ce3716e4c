"""A reward model served by a real vLLM: what it gives is what the model says."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollmill.tasks.processes.launched_process import LaunchedProcess, free_port
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.scoring import Scoring
from rollmill.tasks.serve import vllm_launch
from rollmill.tasks.serve.config import ServeConfig
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.store.rows import Rows, column_values
from tests.stubs.toy_settings import TOY

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
    config, port = ServeConfig(**TOY["serve"]), free_port()
    command = [
        config.python,
        *("-m", "vllm.entrypoints.openai.api_server", "--runner", "pooling"),
        *("--model", str(reward_model), "--served-model-name", "reward"),
        *("--host", vllm_launch.LOOPBACK, "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "128", "--enforce-eager"),
    ]
    log = tmp_path_factory.mktemp("reward-model") / "vllm.log"
    process = LaunchedProcess.start(
        "reward model", command, log=log, env=vllm_launch.vllm_environment(config), stop_grace_s=2.0
    )
    try:
        address = f"http://{vllm_launch.LOOPBACK}:{port}"
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
    assert column_values(scores, "error") == ["", "", ""]
    expected = [logits(reward_model, f"1+1={answer}")[REWARD] for answer in answers]
    assert column_values(scores, "reward") == pytest.approx(expected, abs=1e-4)


def logits(folder: Path, text: str) -> list[float]:
    import torch
    from tokenizers import Tokenizer
    from transformers import Qwen2ForSequenceClassification

    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    model = Qwen2ForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].tolist()
