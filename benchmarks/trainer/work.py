"""A batch and a start model in a folder, which every way of training reads, in whatever environment.

FOLDER/model is a Hugging Face folder; FOLDER/rows.npz has `token_ids` and `logprobs` row by row, joined, `lengths` [B] in tokens
with the prompt, and `rewards` [B].
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.trainer.lengths import N_PROMPT_TOKENS, completion_lengths
from rollmill.tasks.train.samples import Samples

N_ROWS, GROUP_SIZE, TEMPERATURE = 32, 8, 1.0
# Rates so small that steps stay alike; and what the peers do: no recomputed activations, micro-batches that fit tiny models.
SETTINGS: dict[str, object] = {
    "lr": 1e-8,
    "warmup_steps": 0,
    "micro_batch_tokens": 4096,
    "gradient_checkpointing": False,
}
SIZES: dict[str, dict[str, Any]] = {
    "5M": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "58M": {
        "vocab_size": 16384,
        "hidden_size": 640,
        "intermediate_size": 1728,
        "num_hidden_layers": 8,
        "num_attention_heads": 10,
        "num_key_value_heads": 2,
    },
}


def make(folder: Path, size: str, seed: int = 0) -> int:
    """Write both; returns the tokens of all rows."""
    torch.manual_seed(seed)
    config = Qwen2Config(**SIZES[size], max_position_embeddings=1024, tie_word_embeddings=False)
    model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(folder / "model")
    random = np.random.default_rng(seed)
    lengths = [N_PROMPT_TOKENS + each for each in completion_lengths(N_ROWS, seed)]
    prompts = random.integers(2, config.vocab_size, (N_ROWS // GROUP_SIZE, N_PROMPT_TOKENS))
    rows = [
        np.concatenate(
            [prompts[row // GROUP_SIZE], random.integers(2, config.vocab_size, length - N_PROMPT_TOKENS)]
        )
        for row, length in enumerate(lengths)
    ]
    np.savez(
        folder / "rows.npz",
        token_ids=np.concatenate(rows),
        logprobs=np.concatenate([_logprobs(model, row) for row in rows]),
        lengths=lengths,
        rewards=random.normal(size=N_ROWS),
    )
    return sum(lengths)


@torch.no_grad()
def _logprobs(model: Qwen2ForCausalLM, row: np.ndarray) -> np.ndarray:
    """[T] nats of a row's tokens, the first one's 0."""
    logits = model(input_ids=torch.from_numpy(row[None])).logits[0, :-1]
    found = torch.log_softmax(logits / TEMPERATURE, 1).gather(1, torch.from_numpy(row[1:, None]))
    return np.concatenate([[0.0], found[:, 0].numpy()]).astype(np.float32)


def advantages(rewards: np.ndarray) -> np.ndarray:
    """[B] of GRPO: what a reward is above its group's mean, in standard deviations."""
    groups = rewards.reshape(-1, GROUP_SIZE)
    spread = groups.std(axis=1, ddof=1, keepdims=True) + 1e-4
    scaled: np.ndarray = (groups - groups.mean(axis=1, keepdims=True)) / spread
    return scaled.reshape(-1).astype(np.float32)


def samples_of(folder: Path) -> Samples:
    """The batch as a trainer has it."""
    with np.load(folder / "rows.npz") as rows:
        ends = np.cumsum(rows["lengths"])[:-1]
        token_ids, logprobs = (np.split(rows[name], ends) for name in ("token_ids", "logprobs"))
        found = advantages(rows["rewards"])
    masks = [np.arange(len(row)) >= N_PROMPT_TOKENS for row in token_ids]
    return Samples(
        trajectory_ids=[str(number) for number in range(len(token_ids))],
        envs=["benchmark"] * len(token_ids),
        temperatures=np.full(len(token_ids), TEMPERATURE, np.float32),
        advantages=found,
        token_ids=token_ids,
        loss_masks=masks,
        logprobs=[np.where(mask, row, np.nan) for mask, row in zip(masks, logprobs, strict=True)],
    )
