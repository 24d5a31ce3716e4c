"""trl's GRPOTrainer on a whole task, in trl's environment: trl_learns.py ROOT CASE FOLDER.

CASE is what benchmarks/races/case.py writes: the same start model, problems, group size and learning rate as ours. It generates
in its own process, as trl can on a CPU. Its last line is a JSON object: seconds of each step, held-out rewards of one
sampled answer before and after, and tokens of a step's completions in the mean. ROOT is where the scorer is imported from.
"""

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

Score = Callable[[dict[str, Any], str, bool], float]


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ended_s: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ended_s.append(time.perf_counter())


def scorer_at(path: str) -> Score:
    """Ours, as a function of an example, an answer, and whether that is complete."""
    from rollmill.tasks.score.scorer import Candidate

    module, _, attribute = path.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    call = found().score if isinstance(found, type) else found

    def score(example: dict[str, Any], answer: str, is_complete: bool) -> float:
        said = [{"role": "assistant", "content": answer}]
        reward = call(Candidate("", example, said, is_complete))
        return float(getattr(reward, "value", reward))

    return score


@torch.no_grad()
def evaluate(model: Any, tokenizer: Any, case: dict[str, Any], score: Score) -> float:
    """Mean reward of one sampled answer to each held-out problem."""
    prompts = tokenizer([each["prompt"] for each in case["held_out"]], padding=True, return_tensors="pt")
    was_training = model.training
    model.eval()
    generated = model.generate(
        **prompts,
        do_sample=True,
        temperature=case["temperature"],
        top_k=0,
        max_new_tokens=case["max_completion_tokens"],
    )
    model.train(was_training)
    answers = generated[:, prompts["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    ended = (answers == tokenizer.eos_token_id).any(1).tolist()
    rewards = map(score, [each["example"] for each in case["held_out"]], texts, ended)
    return statistics.mean(rewards)


def config_of(case: dict[str, Any], folder: Path) -> GRPOConfig:
    """The same objective as ours: clipped ratios, advantages without the deviation, the batch's mean over tokens."""
    n_rows = case["groups_per_step"] * case["group_size"]
    return GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=case["rows_at_a_time"],
        gradient_accumulation_steps=n_rows // case["rows_at_a_time"],
        num_generations=case["group_size"],
        max_completion_length=case["max_completion_tokens"],
        max_steps=case["steps"],
        learning_rate=case["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=case["warmup_steps"],
        epsilon=case["clip_low"],
        epsilon_high=case["clip_high"],
        max_grad_norm=case["max_grad_norm"],
        scale_rewards="none",
        loss_type="dapo",
        beta=0.0,
        temperature=case["temperature"],
        shuffle_dataset=False,
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        bf16=False,
        use_cpu=True,
        seed=case["seed"],
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
    )


def main() -> None:
    root, file, folder = sys.argv[1:]
    sys.path.append(root)
    case = json.loads(Path(file).read_text())
    torch.set_num_threads(case["threads"])
    set_seed(case["seed"])
    model = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(case["model"], padding_side="left")
    score, tokens, clock = scorer_at(case["scorer"]), [], Clock()

    def reward(
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        example: Sequence[dict[str, Any]],
        **_: Any,
    ) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        ended = [tokenizer.eos_token_id in ids for ids in completion_ids]
        return list(map(score, example, completions, ended))

    before = [evaluate(model, tokenizer, case, score)] if case["held_out"] else []
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config_of(case, Path(folder)),
        train_dataset=Dataset.from_list(case["problems"]),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    after = [evaluate(model, tokenizer, case, score)] if case["held_out"] else []
    steps_s = [later - earlier for earlier, later in zip(clock.ended_s, clock.ended_s[1:], strict=False)]
    print(json.dumps({"step_s": steps_s, "held_out": before + after, "tokens": statistics.mean(tokens)}))


if __name__ == "__main__":
    main()
