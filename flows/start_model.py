"""The start model: kept under a digest of its recipe and seed, made when it is not there."""

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.config import RunConfig
from flows.failure import one_error
from flows.recipe import start_model_folder
from flows.ui.progress import CountProgress, has_bar, say
from tasks.errors import ConfigError, TrainError
from tasks.observe.spans import span
from tasks.rollout.conversation import tokenized
from tasks.rollout.environment import WarmUp, environment_of
from tasks.rollout.tokens import ChatTokenizer, save_character_tokenizer
from tasks.serve.process import LaunchedProcess
from tasks.store.corpus import write_corpus

SCRATCH = ".start-model-"
"""Begin of the names of folders in which start models are made."""


@flow(name="start-model", persist_result=False)
async def start_model(config: RunConfig) -> str:
    """Make the start model of a configuration; returns its folder."""
    return str(await ensure_start_model(config))


async def ensure_start_model(config: RunConfig) -> Path:
    """The start model's folder; it is made first when it is not there."""
    folder = start_model_folder(config)
    if not (folder / "config.json").is_file():
        with span("starting", cause="start model"):
            say(
                f"making the start model {folder}: {config.start_model.steps} steps, 900 take about a minute on one core"
            )
            await make_start_model(config, folder)
    return folder


@task(name="start model", cache_policy=NO_CACHE, persist_result=False)
async def make_start_model(config: RunConfig, folder: Path) -> None:
    """Write the corpus and train on it, in a process of its own; the folder appears whole."""
    recipe = config.start_model
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent, older_than_s=recipe.timeout_s)
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder.parent) as scratch:
        corpus, tokenizer = Path(scratch) / "corpus.arrow", Path(scratch) / "tokenizer"
        _write_corpus(config, tokenizer, corpus)
        settings, pipe = Path(scratch) / "config.json", Path(scratch) / "progress"
        settings.write_text(
            json.dumps(
                {
                    "recipe": recipe.model_dump(),
                    "seed": config.seed,
                    "corpus": str(corpus),
                    "tokenizer": str(tokenizer),
                    "output": str(folder),
                    "progress": str(pipe),
                }
            )
        )
        async with _progress(pipe, recipe.steps):
            await _train(settings, folder, recipe.timeout_s, config.serve.stop_grace_s)


def _sweep(models: Path, older_than_s: float) -> None:
    """Remove what killed processes left; what is younger than a start model takes may be in use by another."""
    for scratch in models.glob(f"{SCRATCH}*"):
        with suppress(OSError):  # another process sweeps too
            if time.time() - scratch.stat().st_mtime > older_than_s:
                shutil.rmtree(scratch)


@asynccontextmanager
async def _progress(pipe: Path, steps: int) -> AsyncIterator[None]:
    """Make a named pipe, and show what is written to it as long: numbers of steps that are done."""
    os.mkfifo(pipe)
    reader = asyncio.StreamReader()
    # Open for writing too: then it has no end before the training has opened it, and that waits for nobody.
    file = os.fdopen(os.open(pipe, os.O_RDWR | os.O_NONBLOCK), "r+b", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), file
    )
    with one_error():
        async with asyncio.TaskGroup() as showing:
            showing.create_task(_show(reader, steps))
            try:
                yield
            finally:
                transport.close()  # ends the reader, and so the showing


async def _show(reader: asyncio.StreamReader, steps: int) -> None:
    with CountProgress("start model", steps) as bar:
        n_shown = 0
        async for line in reader:
            n_steps = int(line)
            bar.advance(n_steps - n_shown)
            n_shown = n_steps
            if not has_bar():
                say(f"start model: {n_steps} of {steps} steps")


async def _train(settings: Path, folder: Path, timeout_s: float, stop_grace_s: float) -> None:
    process = LaunchedProcess.start(
        "start model",
        [sys.executable, "-m", "tasks.train.supervised", str(settings)],
        log=folder.parent / f"{folder.name}.log",
        env=dict(os.environ),
        stop_grace_s=stop_grace_s,
    )
    try:
        async with asyncio.timeout(timeout_s):
            status = await process.ended()
    except TimeoutError:
        raise TrainError(f"start model: not done within start_model.timeout_s = {timeout_s:g} s") from None
    finally:
        await process.stop()
    if status != 0:
        raise TrainError(f"start model: training ended with status {status}:\n{process.log_tail()}")


def _write_corpus(config: RunConfig, tokenizer_folder: Path, path: Path) -> None:
    environment = environment_of(config.rollout)
    if not isinstance(environment, WarmUp):
        remedy = f"environment {environment.name} has no warm-up corpus; give `model` instead"
        raise ConfigError("start_model.enabled", True, remedy)
    tokenizer = ChatTokenizer.load(save_character_tokenizer(tokenizer_folder))
    n_examples = config.start_model.steps * config.start_model.batch_size
    examples = [
        tokenized(tokenizer, conversation, environment.tools, environment.stop)
        for conversation in environment.warm_up_corpus(config.seed, n_examples)
    ]
    write_corpus(path, [token_ids for token_ids, _ in examples], [loss_mask for _, loss_mask in examples])
