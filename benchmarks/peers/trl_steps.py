"""trl's GRPOTrainer on the same batch, a step on each request; run in trl's environment: trl_steps.py FOLDER.

Before each step it waits for a line on its standard input, and answers after it with CPU seconds and peak memory as a line of
JSON; the first step leaves the gradient in FOLDER/trl.safetensors.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

GROUP_SIZE, ROWS_AT_A_TIME, N_PROMPT_TOKENS, MOST_STEPS = 8, 4, 64, 1000


class StepOnRequest(TrainerCallback):
    """Waits for a request before each step."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._started, self._n_steps = folder, 0.0, 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._n_steps and not sys.stdin.readline():
            control.should_training_stop = True
            sys.exit(0)
        self._started = time.process_time()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not self._n_steps:
            gradient = {name: each.grad.clone() for name, each in model.named_parameters()}
            save_file(gradient, self._folder / "trl.safetensors")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        spent = time.process_time() - self._started
        if self._n_steps:
            print(json.dumps({"cpu_s": spent, "peak_mb": peak_mb()}), flush=True)
        else:
            Path("/proc/self/clear_refs").write_text("5")
        self._n_steps += 1


def peak_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith("VmHWM"))
    return int(found.split()[1]) * 1024 / 1e6


def tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Of words that are numbers."""
    words = {"<pad>": 0, "<end>": 1} | {str(number): number for number in range(2, size)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<end>")


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    with np.load(folder / "rows.npz") as stored:
        ends = np.cumsum(stored["lengths"])[:-1]
        rows, logprobs = (np.split(stored[name], ends) for name in ("token_ids", "logprobs"))
        rewards = stored["rewards"].tolist()
    n_rows = len(rows)
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=ROWS_AT_A_TIME,
        gradient_accumulation_steps=n_rows // ROWS_AT_A_TIME,
        num_generations=GROUP_SIZE,
        max_completion_length=max(map(len, rows)) - N_PROMPT_TOKENS,
        max_steps=MOST_STEPS,
        learning_rate=1e-8,
        lr_scheduler_type="constant",
        epsilon_high=0.28,
        beta=0.0,
        temperature=1.0,
        loss_type="dapo",
        shuffle_dataset=False,
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
    )

    def rollout(prompts: list[str], _: GRPOTrainer) -> dict[str, Any]:
        assert len(prompts) == n_rows
        return {
            "prompt_ids": [row[:N_PROMPT_TOKENS].tolist() for row in rows],
            "completion_ids": [row[N_PROMPT_TOKENS:].tolist() for row in rows],
            "logprobs": [row[N_PROMPT_TOKENS:].tolist() for row in logprobs],
            "reward": rewards,
        }

    def reward(reward: list[float], **_: Any) -> list[float]:
        return reward

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(
            [{"prompt": str(2 + group)} for group in range(n_rows // GROUP_SIZE)]
        ),
        processing_class=tokenizer(model.config.vocab_size),
        rollout_func=rollout,
        callbacks=[StepOnRequest(folder)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
