"""What must hold before anything is started; each failure names the setting, its value and the remedy."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from flows.checks.attached import check_attached
from flows.config import RunConfig
from flows.recipe import start_model_folder
from tasks.errors import ConfigError
from tasks.observe.metrics import ALL
from tasks.observe.sink_check import check_sinks
from tasks.rollout.environment import Environment, SingleTurn, WarmUp, environment_of, library_of
from tasks.rollout.prompts import check_prompts
from tasks.rollout.state import states_of
from tasks.rollout.tokens import ChatTokenizer
from tasks.rollout.verifiers_load import check_installed
from tasks.rollout.verifiers_state import kept_states
from tasks.score.check import check_scorer
from tasks.serve.vllm import check_guarded, is_cpu_build
from tasks.store.layout import S3, SCRATCH_ENV, RunFolder
from tasks.train.config import TrainConfig
from tasks.train.memory_plan import NUMBERS_OF_EXPERTS
from tasks.train.rules import HAS_RATIO


def preflight(config: RunConfig, *, samples: bool = True, trains: bool = True) -> None:
    """Check what a configuration needs of this machine.

    Args:
        config: all settings.
        samples: False for a run that has no vLLM servers.
        trains: False for one that has no trainer.

    Raises:
        ConfigError: the first thing that is missing.
    """
    if samples:
        _check_stages(config)
    if trains and not config.train.url:
        _check_loss(config.train)
    _check_model(config)
    check_store(config.store.root)
    check_sinks(config.observe)
    if samples and not config.serve.urls:
        check_vllm(config)
    if trains:
        _check_trainer(config)
    asyncio.run(check_attached(config, samples=samples, trains=trains))


def _check_trainer(config: RunConfig) -> None:
    """What a trainer needs here, or what attaching to one does."""
    if not config.train.url:
        check_trainer(config)
    elif not os.environ.get(config.train.token_env):
        remedy = "set this environment variable to the access token of the trainer at train.url"
        raise ConfigError("train.token_env", config.train.token_env, remedy)


def _check_stages(config: RunConfig) -> None:
    check_scorer(config.score, config.evaluate.scorer)
    if library_of(config.rollout):
        _check_environment_name(config.rollout.environment.rpartition(":")[2])
        _check_library(config)
        return
    environment = environment_of(config.rollout)
    _check_environment_name(environment.name)
    states_of(environment)
    check_prompts(environment, config.rollout, config.evaluate.n_prompts)
    _check_overlong(config, environment)
    if config.start_model.enabled and not isinstance(environment, WarmUp):
        remedy = f"environment {environment.name} has no warm-up corpus; give `model` instead"
        raise ConfigError("start_model.enabled", True, remedy)


def _check_environment_name(name: str) -> None:
    if name == ALL:
        remedy = (
            "this name is taken: metrics of all environments together have it; give the environment another"
        )
        raise ConfigError("rollout.environment", ALL, remedy)


def _check_loss(train: TrainConfig) -> None:
    """Try a loss of another package in a process of its own, since it imports torch."""
    if train.loss in HAS_RATIO:
        return
    words = [sys.executable, "-m", "tasks.train.loss_check", train.model_dump_json()]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=train.start_timeout_s)
    if done.returncode:
        remedy = f"it ended the process that tried it: {done.stderr.strip()[-500:]}"
        raise ConfigError("train.loss", train.loss, remedy)
    if wrong := json.loads(done.stdout.splitlines()[-1]):
        raise ConfigError(*wrong)


def _check_overlong(config: RunConfig, environment: Environment) -> None:
    """Refuse a limit that no answer of one turn reaches."""
    limit, longest = config.score.overlong_limit_tokens, config.rollout.max_completion_tokens
    if limit <= longest:
        return
    episode = environment.episode(asyncio.run(environment.example("train", 0)), seed=0)
    if isinstance(episode, SingleTurn):
        remedy = (
            f"an answer in environment {environment.name} has rollout.max_completion_tokens = {longest} at most; give "
            "at most as many, or 0 for no shaping"
        )
        raise ConfigError("score.overlong_limit_tokens", limit, remedy)


def _check_library(config: RunConfig) -> None:
    """What can be said without importing the library, which only worker processes do."""
    check_installed(config.rollout.environment, config.rollout.environment_args)
    kept_states(config.rollout.keep_states)
    if config.start_model.enabled:
        remedy = f"environment {config.rollout.environment} has no warm-up corpus; give `model` instead"
        raise ConfigError("start_model.enabled", True, remedy)


def _check_model(config: RunConfig) -> None:
    reference = config.train.kl.model
    if reference and not config.train.url and not (Path(reference) / "config.json").is_file():
        remedy = "not a model folder in Hugging Face format (config.json is missing); give a local folder"
        raise ConfigError("train.kl.model", reference, remedy)
    if config.train.replay_routing and not _has_experts(config):
        remedy = "the start model is no mixture of experts, so its tokens are not routed; set it to false"
        raise ConfigError("train.replay_routing", True, remedy)
    if config.start_model.enabled:
        _check_folder("start_model.root", config.start_model.root)
        return
    folder = start_model_folder(config)
    if not (folder / "config.json").is_file():
        remedy = "not a model folder in Hugging Face format (config.json is missing); give a local folder"
        raise ConfigError("model", config.model, remedy)
    ChatTokenizer.load(folder)


def _has_experts(config: RunConfig) -> bool:
    """True for a model whose configuration gives a number of experts; those made here have none."""
    path = start_model_folder(config) / "config.json"
    if config.start_model.enabled or not path.is_file():
        return False
    settings = json.loads(path.read_text())
    return any((settings | settings.get("text_config", {})).get(name) for name in NUMBERS_OF_EXPERTS)


def check_store(root: str) -> None:
    """Refuse a root that runs cannot lie below; ConfigError says why."""
    if "://" not in root:
        _check_folder("store.root", root)
        return
    if not root.startswith(S3):
        raise ConfigError("store.root", root, "give a folder on a local disk, or s3://bucket/prefix")
    from tasks.store.s3 import check_s3  # s3fs and botocore are imported where runs lie on S3 alone

    check_s3(root)
    _check_folder(SCRATCH_ENV, str(RunFolder(root).local))


def _check_folder(field: str, value: str) -> None:
    """Refuse a folder that cannot be made or written to."""
    nearest = Path(value).absolute()
    while not nearest.exists():
        nearest = nearest.parent
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        remedy = f"cannot write to {nearest} ({error.strerror}); give a folder that this user may write to"
        raise ConfigError(field, value, remedy) from None


def check_trainer(config: RunConfig) -> None:
    """Check what launching a trainer needs; ConfigError names the first thing that is missing."""
    _check_compiler()
    _check_port("train.port", config.train.port)


def check_vllm(config: RunConfig) -> None:
    """Check what launching a vLLM server needs; ConfigError names the first thing that is missing."""
    for number in range(config.serve.servers if config.serve.port else 0):
        _check_port("serve.port", config.serve.port + number)
    python = Path(config.serve.python)
    if not os.access(python, os.X_OK):
        remedy = (
            "there is no Python there; make the vLLM environment with `make setup`, or attach with serve.urls"
        )
        raise ConfigError("serve.python", str(python), remedy)
    check_guarded(config.serve)
    if config.rollout.keep_routing and is_cpu_build(config.serve.python):
        remedy = "vLLM returns routed experts on GPUs alone, and serve.python has its CPU build"
        raise ConfigError("rollout.keep_routing", True, remedy)


def _check_compiler() -> None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None and shutil.which("g++") is None:
        remedy = (
            "DeepSpeed builds an extension at first use: install a C++ compiler (Debian: apt-get install g++)"
        )
        raise ConfigError("C++ compiler", compiler, remedy)


def _check_port(field: str, port: int) -> None:
    """Refuse a port that is taken; 0 is any free one."""
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                field, port, f"the port is taken ({error.strerror}); give another, or 0 for any"
            ) from None
