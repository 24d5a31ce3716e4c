"""Checks before anything is started; each failure names the setting, its value and the remedy."""

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rollmill.flows.checks.attached import check_attached
from rollmill.flows.checks.gpu_assignment import assign_run_gpus
from rollmill.flows.checks.gpu_memory import check_gpus
from rollmill.flows.checks.machine_needs import (
    check_address,
    check_folder,
    check_store,
    check_trainer,
    check_vllm,
)
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.environments import (
    environment_configs,
    group_shares,
    name_environment,
)
from rollmill.flows.configuration.executor_config import ExecutorConfig
from rollmill.flows.configuration.recipe import download_model, start_model_folder
from rollmill.flows.configuration.rules import check_sampling
from rollmill.tasks.config import check_extra, find_plugins, suggest
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.problem_weights import check_problem_weight
from rollmill.tasks.look.tables.stored_groups import check_choice
from rollmill.tasks.observe.sinks.sink_check import check_sinks
from rollmill.tasks.processes.gpus import read_gpus
from rollmill.tasks.processes.python_child import child_environment, python_command
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer
from rollmill.tasks.rollout.environment import (
    Environment,
    Episode,
    SingleTurn,
    WarmUp,
    environment_library,
    make_environment,
    needs_worker,
)
from rollmill.tasks.rollout.environment_calls import check_environment, check_environment_name, state_columns
from rollmill.tasks.rollout.environments.verifiers.loading import check_installed, parse_state_columns
from rollmill.tasks.rollout.trajectory_requests import check_prompts
from rollmill.tasks.score.terms import check_scorer
from rollmill.tasks.store.model_folders import MODELS, model_folder
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.memory_plan import NUMBERS_OF_EXPERTS
from rollmill.tasks.train.service.launch import TOKEN_ENV
from rollmill.tasks.train.setting_rules import HAS_RATIO

Value = TypeVar("Value")

MOST_NAME = 100
"""Characters of a wrong name that an error repeats."""
# Ends of the class names of models that predict the next token of a text. Classes with images or an encoder end otherwise.
CAUSAL_ARCHITECTURES = ("ForCausalLM", "LMHeadModel")


async def check_machine(check: Callable[[], None]) -> None:
    """Call `check`, which calls `preflight`, if this flow run belongs to a deployment, so that a worker has started it.

    For other flow runs the command `rollmill` has checked the machine already.

    Raises:
        ConfigError: the first thing that is missing.
    """
    # Prefect may be imported only once its settings are known, and commands import this module before.
    from prefect.runtime import deployment

    if deployment.id:
        await asyncio.to_thread(check)


def preflight(config: RunConfig, *, samples: bool = True, trains: bool = True) -> None:
    """Check that this machine has what a run with these settings needs.

    Args:
        config: all settings.
        samples: False for a run without vLLM servers.
        trains: False for a run without a trainer.

    Raises:
        ConfigError: the first thing that is missing.
    """
    if trains:
        check_sampling(config)
    tried = []
    for at, (name, each) in enumerate(environment_configs(config).items()):
        with name_environment(config, name):
            if samples:
                check_problem_weight(each.rollout.problem_weight)
                check_choice(each.rollout.replay.where, each.rollout.replay.order_by)
            if samples and (found := _check_stages(each, group_shares(config).most_per_step(at))):
                tried.append(found)
    # An attached trainer may have a loss's package that is missing here.
    if trains and not config.train.url:
        check_loss(config.train, config.start_timeout_s)
    tokenizer = _check_model(config)
    if tokenizer:
        for environment, episode in tried:
            _check_turns(environment, episode, tokenizer)
    check_store(config.store.root)
    check_sinks(config.observe)
    _check_executor(config.executor)
    if trains:
        _check_trainer(config, syncs=samples)
    # After what costs less, since it starts an interpreter.
    if samples and not config.serve.urls:
        check_vllm(config)
    check_gpus(config, assign_run_gpus(config, samples=samples, trains=trains), read_gpus())
    # Last, since it may wait for services that are starting.
    asyncio.run(check_attached(config, samples=samples, trains=trains))


def preflight_in_turn(config: RunConfig, *, trains: bool = True, samples: bool = True) -> None:
    """Run `preflight` for a flow that trains first and then launches servers for the result: GPUs need not have room for both at once.

    Args:
        config: all settings; servers at `serve.urls` are not used.
        trains: False if nothing is left to train.
        samples: False if nothing is left to sample.

    Raises:
        ConfigError: the first thing that is missing.
    """
    if trains:
        preflight(config, samples=False)
    if samples:
        serve = config.serve.model_copy(update={"urls": ()})
        preflight(config.model_copy(update={"serve": serve}), trains=False)


def _check_executor(executor: ExecutorConfig) -> None:
    """Raise ConfigError if the executor's library is missing."""
    if executor.kind == "ray":
        check_extra("executor.kind", executor.kind, "ray", "ray")


def _check_trainer(config: RunConfig, *, syncs: bool) -> None:
    """Raise ConfigError for what a launched trainer lacks here, or for the missing access token of the one at train.url.

    `syncs` is False without servers, to which weights would be sent.
    """
    if not config.train.url:
        check_trainer()
        if config.sync.host in ("", "0.0.0.0", "::"):
            raise ConfigError("sync.host", config.sync.host, "give one address, which servers can connect to")
        check_address("sync.host", config.sync.host)
        if syncs and config.sync.transport in ("nccl", "ipc") and not read_gpus():
            remedy = "it sends weights between GPUs, and this machine has none; give auto"
            raise ConfigError("sync.transport", config.sync.transport, remedy)
    elif not os.environ.get(TOKEN_ENV):
        remedy = "set this environment variable to the access token of the trainer at train.url"
        raise ConfigError(TOKEN_ENV, "", remedy)


def _check_stages(config: RunConfig, n_groups: int) -> tuple[Environment, Episode] | None:
    """Check one environment, with at most `n_groups` groups a step, and its scorer; returns the environment and an episode that was tried, None for one of a library.

    Raises:
        ConfigError: names the setting.
    """
    check_scorer(config.score, config.evaluate.scorer)
    # Only worker processes import such a library, so its prompts are not checked here.
    if environment_library(config.rollout):
        given = config.rollout.environment.name
        check_environment_name(given, given.rpartition(":")[2])
        _check_library(config)
        return None
    environment, episode = _open_environment(config, n_groups)
    _check_overlong(config, environment, episode)
    if config.start_model.steps and not isinstance(environment, WarmUp):
        remedy = f"environment {environment.name} has no warm-up corpus; give `model` instead"
        raise ConfigError("start_model.steps", config.start_model.steps, remedy)
    return environment, episode


def _open_environment(config: RunConfig, n_groups: int) -> tuple[Environment, Episode]:
    """Create the environment and try it; ConfigError if it lacks something, or is not done within `start_timeout_s`."""

    def open_it() -> tuple[Environment, Episode]:
        environment = make_environment(config.rollout)
        episode = check_environment(environment, config.rollout)
        state_columns(environment)
        check_prompts(environment, config.rollout, config.evaluate.n_prompts, n_groups)
        return environment, episode

    if ":" not in config.rollout.environment.name and not needs_worker(config.rollout):
        return open_it()
    # Code or a server of the user may block. A daemon thread does not keep this process from ending then.
    opened: Future[tuple[Environment, Episode]] = Future()
    threading.Thread(target=_fill, args=(opened, open_it), name="preflight-environment", daemon=True).start()
    if not wait([opened], config.start_timeout_s).done:
        remedy = (
            f"its first problem was not opened within start_timeout_s = {config.start_timeout_s:g} s: its module, its constructor, "
            "example, episode or reply blocks, or a server does not answer"
        )
        raise ConfigError("rollout.environment", config.rollout.environment.name, remedy)
    return opened.result()


def _fill(future: Future[Value], call: Callable[[], Value]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - the thread that waits for the future raises it
        future.set_exception(error)


def _check_turns(environment: Environment, episode: Episode, tokenizer: ChatTokenizer) -> None:
    """Raise ConfigError if the chat template cannot join the turns of an environment that has tools or several turns."""
    if environment.tools:
        tokenizer.check_turns("tool", environment.tools)
    elif not isinstance(episode, SingleTurn):
        tokenizer.check_turns("user")


def _has_module(name: str) -> bool:
    """Return True if a module can be imported; `__main__` has no specification in a program that was started by its path."""
    try:
        return find_spec(name) is not None
    except ValueError:
        return False


def check_loss(train: TrainConfig, timeout_s: float) -> None:
    """Raise ConfigError if `train.loss` is of another package and does not work.

    It is tried in a separate process, since it imports torch, for at most `timeout_s` seconds.
    """
    name = train.loss.name
    if name in HAS_RATIO:
        return
    plugins = find_plugins("losses")
    path = plugins.get(name, name)
    package = path.partition(":")[0].partition(".")[0]
    if ":" not in path or not package or not _has_module(package):
        names = (*HAS_RATIO, *plugins)
        remedy = (
            f"give a loss by name ({', '.join(names)}) or an import path package.module:function "
            f"(there is no module {package[:MOST_NAME]!r}){suggest(name, names)}"
        )
        raise ConfigError("train.loss", name, remedy)
    # The program prints null, or the arguments of a ConfigError.
    command = python_command("rollmill.tasks.train.objective.objective", train.model_dump_json())
    try:
        done = subprocess.run(
            command, env=child_environment(), capture_output=True, text=True, check=True, timeout=timeout_s
        )
        wrong = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        remedy = f"it was not tried on three tokens within start_timeout_s = {timeout_s:g} s"
        raise ConfigError("train.loss", name, remedy) from None
    except subprocess.CalledProcessError as error:
        remedy = f"the process that tried it failed: {error.stderr.strip()[-500:]}"
        raise ConfigError("train.loss", name, remedy) from None
    except (ValueError, IndexError):
        remedy = "the process that tried it ended without a result: the loss may not end its process"
        raise ConfigError("train.loss", name, remedy) from None
    if wrong:
        raise ConfigError(*wrong)


def _check_overlong(config: RunConfig, environment: Environment, episode: Episode) -> None:
    """Raise ConfigError if no answer of a single-turn environment can reach the largest of `score.overlong_tokens`."""
    lengths, longest = list(config.score.overlong_tokens), config.rollout.max_completion_tokens
    if max(lengths, default=0) <= longest:
        return
    if isinstance(episode, SingleTurn):
        remedy = (
            f"an answer in environment {environment.name} has at most rollout.max_completion_tokens = {longest} tokens; "
            "give at most that many, or [] for no shaping"
        )
        raise ConfigError("score.overlong_tokens", lengths, remedy)


def _check_library(config: RunConfig) -> None:
    """Raise ConfigError if the package of a library's environment is missing, or settings do not fit it.

    The library is not imported: only worker processes do that.
    """
    check_installed(config.rollout.environment.name)
    parse_state_columns(config.rollout.keep_states)
    if config.start_model.steps:
        remedy = f"environment {config.rollout.environment.name} has no warm-up corpus; give `model` instead"
        raise ConfigError("start_model.steps", config.start_model.steps, remedy)


def _check_model(config: RunConfig) -> ChatTokenizer | None:
    """Check the models that the settings name; returns the tokenizer of the policy, None for a start model made here.

    Raises:
        ConfigError: names the setting.
    """
    reference = config.train.kl.model
    if reference and not config.train.url:
        download_model("train.kl.model", reference)
        check_architecture("train.kl.model", model_folder(reference))
        check_rope("train.kl.model", model_folder(reference), config.serve.max_model_len)
    download_model("model", config.model)
    if config.train.replay_routing and not _has_experts(config):
        remedy = "the start model is not a mixture of experts; set it to false"
        raise ConfigError("train.replay_routing", True, remedy)
    if config.start_model.steps:
        check_folder("working folder", str(MODELS.absolute().parent))
        return None
    folder = start_model_folder(config)
    check_architecture("model", folder)
    check_rope("model", folder, config.serve.max_model_len)
    return ChatTokenizer.load(folder, config.rollout.chat_template, config.rollout.chat_template_kwargs)


def check_architecture(field: str, folder: Path) -> None:
    """Refuse a model folder whose config.json names a model that the trainer cannot load or train.

    Raises:
        ConfigError: no config.json; no causal language model of text alone; quantized weights; a class that transformers lacks.
    """
    path = folder / "config.json"
    if not path.is_file():
        remedy = "not a model folder in Hugging Face format (config.json is missing); give a local folder"
        raise ConfigError(field, str(folder), remedy)
    settings = _read_model_settings(field, folder)
    names, model_type = settings.get("architectures") or [], settings.get("model_type") or ""
    if names and not any(name.endswith(CAUSAL_ARCHITECTURES) for name in names):
        remedy = (
            f"{', '.join(names)} is not supported: only causal language models of text are, "
            f"whose class in config.json ends with {' or '.join(CAUSAL_ARCHITECTURES)}"
        )
        raise ConfigError(field, str(folder), remedy)
    if quantization := settings.get("quantization_config"):
        method = quantization.get("quant_method", "a quantization_config")
        remedy = f"its weights are quantized ({method}) and cannot be trained; give the model in bfloat16 or float32"
        raise ConfigError(field, str(folder), remedy)
    # Models of transformers may name code in their folder too. transformers finds modules without importing torch.
    module = model_type.replace("-", "_")
    if "auto_map" in settings and not (module.isidentifier() and find_spec(f"transformers.models.{module}")):
        remedy = f"model type {model_type!r} needs code of its folder (auto_map), which is never executed; give a model of transformers"
        raise ConfigError(field, str(folder), remedy)


class _ModelSettings(msgspec.Struct):
    """Types of those values of a model's config.json that are read here."""

    architectures: list[str] | None = None
    model_type: str | None = None
    text_config: "_ModelSettings | None" = None
    quantization_config: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int | None = None


def _read_model_settings(field: str, folder: Path) -> dict[str, Any]:
    """Read a model's config.json; ConfigError if it is damaged."""
    try:
        data = (folder / "config.json").read_bytes()
        msgspec.json.decode(data, type=_ModelSettings)
        settings: dict[str, Any] = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        remedy = f"its config.json cannot be read ({error}); copy or download the model again"
        raise ConfigError(field, str(folder), remedy) from error
    return settings


def check_rope(field: str, folder: Path, longest: int) -> None:
    """Refuse a model whose position encoding would depend on the longest row of a micro-batch.

    transformers chooses the factors of longrope and dynamic by the longest row of a forward pass, and vLLM by serve.max_model_len.
    Up to the length at which they change, both have the same factors for every row.

    Args:
        field: the setting that names the model.
        folder: the model's folder, with a config.json.
        longest: serve.max_model_len.

    Raises:
        ConfigError: names the model, and the longest serve.max_model_len that it can be trained with.
    """
    settings = _read_model_settings(field, folder)
    settings |= settings.get("text_config") or {}
    given = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    # A model may have parameters for each kind of layer.
    for rope in (given, *(each for each in given.values() if isinstance(each, dict))):
        kind = rope.get("rope_type") or rope.get("type")
        # Phi-3 may call its encoding yarn, too; its sets of factors tell it from others.
        is_long = kind in ("longrope", "su") or "long_factor" in rope
        if not is_long and kind != "dynamic":
            continue
        # transformers prefers the length of the model or of its rope, depending on the form of config.json: the smaller is safe.
        given_lengths = [
            each.get("original_max_position_embeddings") for each in ((rope, settings) if is_long else ())
        ]
        lengths = [each for each in given_lengths if isinstance(each, int)]
        limit = min(lengths, default=settings.get("max_position_embeddings") or 0)
        if longest > limit:
            remedy = (
                f"the factors of its position encoding ({kind}) change at {limit} tokens, so a row would depend on the longest of its "
                f"micro-batch, and differ from the servers'; serve.max_model_len is {longest}: set it to at most {limit}, or give "
                "another model"
            )
            raise ConfigError(field, str(folder), remedy)


def _has_experts(config: RunConfig) -> bool:
    """Return True if the model's config.json gives a number of experts; start models made here have none."""
    path = start_model_folder(config) / "config.json"
    if config.start_model.steps or not path.is_file():
        return False
    settings = json.loads(path.read_text())
    return any((settings | settings.get("text_config", {})).get(name) for name in NUMBERS_OF_EXPERTS)
