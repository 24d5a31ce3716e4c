"""The command `rollmill doctor`: a line for each check of the machine, and for each trial with real services.

The trials compare both layouts of rows, start a trainer and a vLLM server, send weights by each transport, and compare
log-probabilities. Trainer and server start with tiny models of different random weights, so that a sync that changes nothing is found.
"""

import asyncio
import json
import logging
import shutil
import tempfile
import textwrap
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import typer
from prefect.logging import disable_run_logger

from rollmill.flows.checks.gpu_assignment import assign_run_gpus
from rollmill.flows.checks.machine_checks import MAKE_ENVIRONMENTS, CheckResult, check_machine_parts
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.failure import one_error
from rollmill.flows.policies.services import ServerService, TrainerService, create_servers, start_services
from rollmill.flows.policies.trainer_state import load_policy
from rollmill.flows.run.trainer_program import run_trainer_program
from rollmill.flows.verify_sync import verify_weights
from rollmill.tasks.errors import RollmillError, SyncError, TrainError
from rollmill.tasks.processes.gpus import list_visible_gpus
from rollmill.tasks.rollout.chat_tokenizer import save_character_tokenizer
from rollmill.tasks.serve.policy_version import PolicyVersion
from rollmill.tasks.store.folders import SCRATCH_ENV, RunFolder
from rollmill.tasks.sync.broadcast import fetch_logprobs
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.sync.weight_parity import FLOAT32_LIMITS, START_LIMITS, LogprobDifferences
from rollmill.tasks.train.engine.memory_plan import GIB

NAME_WIDTH = 24


def examine(python: str, root: str, *, with_services: bool, as_json: bool) -> bool:
    """Check the machine and print the results; returns False if a check failed.

    Args:
        python: serve.python.
        root: store.root.
        with_services: True to start a trainer and a server, unless a check before failed.
        as_json: print one JSON object at the end in place of lines.
    """
    results: list[CheckResult] = []

    def report(result: CheckResult) -> None:
        results.append(result)
        if not as_json:
            typer.echo("\n".join(format_result(result, shutil.get_terminal_size().columns)))

    for result in check_machine_parts(root, python):
        report(result)
    if with_services and any(each.status == "failed" for each in results):
        report(CheckResult("services", "skipped", "not started, since a check before failed"))
    elif with_services:
        # What services log goes to their own logs; an error's text has the last lines.
        logging.getLogger("prefect").setLevel(logging.CRITICAL)
        with disable_run_logger():
            asyncio.run(try_services(python, report))
    has_passed = all(each.status != "failed" for each in results)
    if as_json:
        typer.echo(json.dumps({"ok": has_passed, "checks": [asdict(each) for each in results]}, indent=1))
    return has_passed


def format_result(result: CheckResult, width: int) -> Sequence[str]:
    """Return the lines of a result, none longer than `width` characters where words allow it."""
    indent = " " * (9 + NAME_WIDTH)
    first, *others = [*result.detail.splitlines(), *([f"-> {result.remedy}"] if result.remedy else [])]
    head = f"{result.status:<9}{result.name:<{NAME_WIDTH}}"
    lines = textwrap.wrap(first, width, initial_indent=head, subsequent_indent=indent) or [head.rstrip()]
    for each in others:
        lines += textwrap.wrap(each, width, initial_indent=indent, subsequent_indent=indent)
    return lines


VERSION = PolicyVersion("doctor", 1, 0)
TRIAL_TIMEOUT_S = 300.0
# Peak memory of a step as a multiple of its plan, up to which torch's allocator has rounded.
MOST_OF_PLAN = 1.05
# First and last lines of an error, which may end with a service's log.
SHOWN_LINES = 8
REMEDY = f"trainer and vLLM's server need their environments: {MAKE_ENVIRONMENTS}"
REMEDIES = {
    "layouts of rows": "set train.layout=padded",
    "memory of a step": "the plan of `rollmill memory` is too low on this machine: leave more free (serve.gpu_memory_utilization)",
    "sync by ipc": "set sync.transport=shm",
    "sync by nccl": "set sync.transport=tcp",
    "sync by shm": "set sync.transport=tcp",
    "sync by tcp": "allow connections between processes on 127.0.0.1",
    "sync by files": "set sync.folder to a folder that trainer and servers can write and read",
}
# Token ids of the sequences on which trainer and server are compared, of the tokenizer's 57.
TOKENS = [[2 + (7 * row + 3 * i) % 50 for i in range(40)] for row in range(4)]


Report = Callable[[CheckResult], None]


async def try_services(python: str, report: Report) -> None:
    """Report the result of each trial as soon as it is known; without services the trials that need them are not made.

    `python` is serve.python, of the environment with vLLM.
    """
    with tempfile.TemporaryDirectory(prefix="doctor-") as scratch:
        folder = Path(scratch)
        save_character_tokenizer(folder / "tokenizer")
        report(await try_trial("layouts of rows", lambda: _try_layouts(folder)))
        if list_visible_gpus():
            report(await try_trial("memory of a step", lambda: _try_memory(folder)))
        if (folder / "server").is_dir():
            report(
                await try_trial(
                    "trainer and vLLM server", lambda: _try_sync(trial_config(folder, python), folder, report)
                )
            )
        else:
            report(CheckResult("trainer and vLLM server", "skipped", "there is no model to start them with"))


def trial_config(folder: Path, python: str) -> RunConfig:
    """Return the settings of the trial's trainer and server; on a machine with one GPU they share it."""
    sizes = {"max_model_len": 256, "gpu_memory_utilization": 0.3, "share_gpus": len(list_visible_gpus()) == 1}
    values = {
        "model": str(folder / "trainer"),
        "start_timeout_s": TRIAL_TIMEOUT_S,
        "rollout": {"max_completion_tokens": 24},
        "train": {"micro_batch_tokens": 1024, "gradient_checkpointing": False},
        "serve": sizes | {"python": python},
        "start_model": {"steps": 0},
    }
    return RunConfig.model_validate(values)


async def try_trial(name: str, work: Callable[[], Awaitable[str]]) -> CheckResult:
    """Make a trial, which returns what it found; an error becomes its result, with the last lines of a service's log."""
    try:
        with one_error():
            return CheckResult(name, "ok", await work())
    except (RollmillError, OSError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        shown = lines if len(lines) <= SHOWN_LINES else [lines[0], "...", *lines[1 - SHOWN_LINES :]]
        return CheckResult(name, "failed", "\n".join(shown), REMEDIES.get(name, REMEDY))
    except Exception as error:  # noqa: BLE001 - whatever is broken on a machine must not end the report
        return CheckResult(name, "failed", f"{type(error).__name__}: {error}", REMEDIES.get(name, REMEDY))


async def _run_trial(name: str, module: str, folder: Path) -> Sequence[Any]:
    """Run a program of tasks/train with the setting `folder`, and return the JSON objects that it prints."""
    log = folder / "trial.log"
    await run_trainer_program(
        name,
        f"rollmill.tasks.train.{module}",
        {"folder": str(folder)},
        log=log,
        timeout_s=TRIAL_TIMEOUT_S,
        timeout_setting="the limit",
    )
    lines = log.read_text().splitlines()
    log.unlink()
    # Libraries log too.
    return [json.loads(line) for line in lines if line.startswith('{"')]


async def _try_layouts(folder: Path) -> str:
    (trial,) = await _run_trial("the comparison of layouts", "packing.doctor_trial", folder)
    figures = f"{trial['logprobs']:.1e} nats, gradients by {trial['gradient']:.1e}"
    text = f"varlen and padded differ by {figures} on {trial['device']} in {trial['dtype']}"
    logprobs, gradient = trial["limits"]
    if not (trial["logprobs"] <= logprobs and trial["gradient"] <= gradient):
        raise TrainError(f"{text}; up to {logprobs:.1e} nats and {gradient:.1e} are rounding")
    return text


async def _try_memory(folder: Path) -> str:
    trials = await _run_trial("the step that measures memory", "engine.memory_trial", folder)
    return compare_memory(trials)


def compare_memory(trials: Sequence[Mapping[str, float]]) -> str:
    """Describe the peak memory of training steps and what was planned.

    Args:
        trials: fields of a MemoryTrial for each step.

    Raises:
        TrainError: a step took more than planned, beyond what torch's allocator rounds up.
    """
    steps = [
        f"{each['peak_bytes'] / GIB:.2f} GiB {'with' if each['gradient_checkpointing'] else 'without'} gradient checkpointing, "
        f"planned {each['planned_bytes'] / GIB:.2f}"
        for each in trials
    ]
    text = "; ".join(steps)
    if any(each["peak_bytes"] > MOST_OF_PLAN * each["planned_bytes"] for each in trials):
        raise TrainError(text)
    return text


async def _try_sync(config: RunConfig, folder: Path, report: Report) -> str:
    """Start a trainer and a server, send the weights by each transport, and compare both before and after."""
    gpus = await asyncio.to_thread(assign_run_gpus, config, samples=True, trains=True)
    trainer = TrainerService(config, folder, {SCRATCH_ENV: str(folder / "scratch")}, gpus.trainer)
    (server,) = create_servers(config, folder / "server", folder, gpus)
    async with start_services((trainer, server)):
        await load_policy(trainer.client, RunFolder(str(folder)), Path(config.model), VERSION)
        differences = await _compare(trainer, server, config)
        if differences.mean < START_LIMITS.mean:
            raise SyncError(
                f"models with different weights differ by {differences.mean:.2g} nats on average only"
            )
        for transport in list_transports():
            sync = partial(_sync, trainer, server, transport, folder)
            report(await try_trial(f"sync by {transport}", sync))
        report(await try_trial("parity", lambda: _check_parity(trainer, server, config)))
        health = await trainer.client.health()
    return f"started, answered and stopped; the trainer computes on {health.device}"


def list_transports() -> tuple[str, ...]:
    """List the transports that can work between a trainer and a server of this machine."""
    n_gpus = len(list_visible_gpus())
    return (*(("nccl",) if n_gpus > 1 else ("ipc",) if n_gpus else ()), "shm", "tcp", "files")


async def _sync(trainer: TrainerService, server: ServerService, transport: str, folder: Path) -> str:
    config = SyncConfig.model_validate({"transport": transport})
    started = time.perf_counter()
    (verdict,) = await verify_weights(
        trainer.client, VERSION, [server.client], config, str(folder / "weights")
    )
    if verdict.differing:
        raise SyncError(f"what arrived, or the live model, differs: {', '.join(verdict.differing[:4])}")
    return f"{verdict.tensors} tensors sent and compared in {time.perf_counter() - started:.1f} s"


async def _check_parity(trainer: TrainerService, server: ServerService, config: RunConfig) -> str:
    found = await _compare(trainer, server, config)
    limits = FLOAT32_LIMITS if config.serve.dtype == "float32" else START_LIMITS
    text = (
        f"log-probabilities differ by {found.mean:.1e} nats on average, {found.high:.1e} at the 99 % quantile"
    )
    if not (found.mean <= limits.mean and found.high <= limits.high):
        raise SyncError(
            f"{text}; at most {limits.mean:g} and {limits.high:g} in {config.serve.dtype} are rounding"
        )
    return text


async def _compare(trainer: TrainerService, server: ServerService, config: RunConfig) -> LogprobDifferences:
    sequences = [np.array(each, np.int32) for each in TOKENS]
    pair = await fetch_logprobs(
        trainer.client.logprobs(TOKENS),
        server.client,
        sequences,
        str(VERSION),
        timeout_s=config.sync.timeout_s,
    )
    return LogprobDifferences.measure(*pair)
