"""The start of a run: its checks, and its start model, stored under a digest of recipe and seed, and trained if missing."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from rollmill.flows.checks.preflight import check_machine, preflight
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.environments import (
    environment_configs,
    group_shares,
    name_environment,
)
from rollmill.flows.configuration.recipe import start_model_folder, start_model_recipe
from rollmill.flows.configuration.rules import check_config, check_sampling
from rollmill.flows.prefect_integration.progress import count_progress, has_bar, say
from rollmill.flows.run.folder import check_resumable, run_folder
from rollmill.flows.run.trainer_program import run_trainer_program
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.problem_weights import check_problem_weight
from rollmill.tasks.look.tables.stored_groups import check_choice
from rollmill.tasks.observe.spans import span
from rollmill.tasks.rollout.chat_tokenizer import (
    ChatTokenizer,
    save_character_tokenizer,
    tokenize_conversation,
)
from rollmill.tasks.rollout.environment import WarmUp, make_environment
from rollmill.tasks.score.terms import check_scorer
from rollmill.tasks.store.warmup_text import write_warmup_text

PROGRAM = "rollmill.tasks.train.supervised"

# Prefix of the folders in which start models are prepared.
SCRATCH = ".start-model-"

# Seconds that the training may take; the default recipe takes about a minute on one core.
TIMEOUT_S = 1800.0


@flow(name="start-model", persist_result=False)
async def start_model(config: RunConfig) -> str:
    """Make the start model of a configuration, unless it exists; returns its folder."""
    return str(await ensure_start_model(config))


async def check_start(run_name: str, config: RunConfig, *, samples: bool = True, trains: bool = True) -> None:
    """Raise an error, before anything is started, if settings, scorer, machine or the stored run make the run impossible.

    Args:
        run_name: folder of the run below `store.root`.
        config: all settings.
        samples: False for a run without vLLM servers.
        trains: False for a run without a trainer.

    Raises:
        ConfigError: settings contradict each other, or this machine lacks something.
        RunFinishedError, RunMismatchError: the run cannot be resumed with these settings.
    """
    with span("checking"):
        check_config(config, trains=trains)
        if trains:
            check_sampling(config)
        if samples:
            for name, each in environment_configs(config).items():
                with name_environment(config, name):
                    check_problem_weight(each.rollout.problem_weight)
                    check_choice(each.rollout.replay.where, each.rollout.replay.order_by)
                    check_scorer(each.score, each.evaluate.scorer)
        await check_machine(partial(preflight, config, samples=samples, trains=trains))
        # `open_run` checks this again, under the lock; a wrong setting must not cost the training of a start model first.
        await asyncio.to_thread(check_resumable, run_folder(run_name, config), config, trains=trains)


async def ensure_start_model(config: RunConfig) -> Path:
    """Return the start model's folder; train the model first if it is missing."""
    folder = start_model_folder(config)
    if not (folder / "config.json").is_file():
        with span("starting", cause="start model"):
            say(f"training the start model {folder}: {config.start_model.steps} steps")
            await make_start_model(config, folder)
    return folder


@task(name="start model", task_run_name="start model", cache_policy=NO_CACHE, persist_result=False, retries=0)
async def make_start_model(config: RunConfig, folder: Path) -> None:
    """Train a start model on the environment's warm-up corpus in a separate process, which writes `folder` when it is done.

    Raises:
        ConfigError: the environment has no warm-up corpus.
        TrainError: training failed or took longer than TIMEOUT_S seconds.
    """
    recipe = start_model_recipe(config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A killed process leaves its scratch folder, as large as the corpus.
    _remove_leftovers(folder.parent, older_than_s=TIMEOUT_S)
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder.parent) as scratch:
        corpus, tokenizer = Path(scratch) / "corpus.arrow", Path(scratch) / "tokenizer"
        # Making the warm-up text takes seconds of CPU, which would block the event loop.
        await asyncio.to_thread(_write_corpus, config, tokenizer, corpus)
        with count_progress("start model", recipe.steps) as advance:
            await run_trainer_program(
                "start model",
                PROGRAM,
                {
                    "recipe": recipe.model_dump(),
                    "seed": config.seed,
                    "corpus": str(corpus),
                    "tokenizer": str(tokenizer),
                    "output": str(folder),
                },
                log=folder.parent / f"{folder.name}.log",
                timeout_s=TIMEOUT_S,
                timeout_setting="the limit",
                on_step=_show_steps(advance, recipe.steps),
            )


def _remove_leftovers(models: Path, older_than_s: float) -> None:
    """Remove scratch folders of killed processes, those older than `older_than_s` seconds; a younger one may be in use."""
    for scratch in models.glob(f"{SCRATCH}*"):
        # Another process may remove it at the same time.
        with suppress(OSError):
            if time.time() - scratch.stat().st_mtime > older_than_s:
                shutil.rmtree(scratch)


def _show_steps(advance: Callable[[int], None], steps: int) -> Callable[[int], None]:
    """Return a function that shows how many of `steps` are done: on the bar, or as a line if there is no bar."""
    n_shown = 0

    def show(n_done: int) -> None:
        nonlocal n_shown
        if n_done == n_shown:
            return
        advance(n_done - n_shown)
        n_shown = n_done
        if not has_bar():
            say(f"start model: {n_done} of {steps} steps")

    return show


def _write_corpus(config: RunConfig, tokenizer_folder: Path, path: Path) -> None:
    tokenizer = ChatTokenizer.load(save_character_tokenizer(tokenizer_folder))
    recipe = start_model_recipe(config)
    n_examples = recipe.steps * recipe.batch_size
    # In the shares of the environments' groups; the training shuffles them.
    shares = replace(group_shares(config), groups_per_step=n_examples)
    examples = [
        example
        for at, each in enumerate(environment_configs(config).values())
        for example in _tokenize_corpus(each, tokenizer, shares.count(at, 0))
    ]
    write_warmup_text(
        path, [token_ids for token_ids, _ in examples], [loss_mask for _, loss_mask in examples]
    )


def _tokenize_corpus(
    config: RunConfig, tokenizer: ChatTokenizer, n_examples: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the tokens and the loss mask of each conversation of one environment's warm-up corpus."""
    environment = make_environment(config.rollout)
    if not isinstance(environment, WarmUp):
        remedy = f"environment {environment.name} has no warm-up corpus; give `model` instead"
        raise ConfigError("start_model.steps", config.start_model.steps, remedy)
    for conversation in environment.warm_up_corpus(config.seed, n_examples):
        yield tokenize_conversation(tokenizer, conversation, environment.tools, environment.stop)
