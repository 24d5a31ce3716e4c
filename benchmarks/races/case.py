"""The same work for everybody: what a run's configuration asks for, as a file that a peer's environment can read."""

import asyncio
import json
from pathlib import Path
from typing import Any

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.recipe import start_model_folder
from rollmill.tasks.rollout.environment import Environment, Split
from rollmill.tasks.rollout.trajectory_requests import example_index


def write_case(
    file: Path, config: RunConfig, environment: Environment, scorer: str, peer: dict[str, Any]
) -> Path:
    """Write a run's problems in the order of its groups, and its settings; returns the file.

    Args:
        file: where to.
        config: of the run.
        environment: that plays it.
        scorer: import path of its scorer, which the peer calls too.
        peer: settings that only the peer has: threads, rows at a time.
    """
    n_groups = config.steps * config.rollout.groups_per_step
    size = environment.size("train")
    indices = [example_index(config.seed, group, size) for group in range(n_groups)]
    n_held_out = config.evaluate.n_prompts if config.evaluate.every else 0
    case = {
        "model": str(start_model_folder(config)),
        "steps": config.steps,
        "seed": config.seed,
        "group_size": config.rollout.group_size,
        "groups_per_step": config.rollout.groups_per_step,
        "max_completion_tokens": config.rollout.max_completion_tokens,
        "temperature": config.rollout.temperature,
        "lr": config.train.lr,
        "warmup_steps": config.train.warmup_steps,
        "clip_low": config.train.clip_low,
        "clip_high": config.train.clip_high,
        "max_grad_norm": config.train.max_grad_norm,
        "scorer": scorer,
        "problems": asyncio.run(problems(environment, "train", indices)),
        "held_out": asyncio.run(problems(environment, "held_out", list(range(n_held_out)))),
    }
    file.write_text(json.dumps(case | peer))
    return file


async def problems(environment: Environment, split: Split, indices: list[int]) -> list[dict[str, Any]]:
    """Prompts, and what the scorer reads: of the quickstart's environment, or of `benchmarks.races.words`."""
    found = [await environment.example(split, index) for index in indices]
    return [{"prompt": str(each.content["problem"]), "example": dict(each.content)} for each in found]
