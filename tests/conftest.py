"""For the whole session: tiny models made here, one vLLM server, one server that speaks S3."""

import asyncio
import gc
import os
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import hypothesis
import pytest

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.processes.launched_process import LaunchedProcess, free_port
from rollmill.tasks.rollout.chat_tokenizer import save_character_tokenizer
from rollmill.tasks.sandbox.bubblewrap import check_bubblewrap
from rollmill.tasks.sandbox.config import SandboxConfig
from rollmill.tasks.serve import vllm_launch
from rollmill.tasks.serve.config import ServeConfig
from rollmill.tasks.serve.vllm_client import VllmClient

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


if "PYTEST_XDIST_WORKER" in os.environ:
    # Torch's threads of two workers on the same cores mostly wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the tests without garbage collection, and leave what is there by then out of later ones.

    Nearly all of it lasts until the end: a third of the time went into looking through it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that last longest first, so that no worker is left alone with one at the end."""
    expected_s: defaultdict[Path, float] = defaultdict(float)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        expected_s[item.path] += 30.0 if "service" in marks else 5.0 if "slow" in marks else 0.05
    items.sort(key=lambda item: expected_s[item.path], reverse=True)


@cache
def find_sandbox_obstacle() -> str:
    """Why no sandbox can start on this machine; empty if one can."""
    try:
        check_bubblewrap("sandbox", SandboxConfig())
    except ConfigError as error:
        return error.remedy
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs a sandbox where none can start."""
    if item.get_closest_marker("sandbox") and (obstacle := find_sandbox_obstacle()):
        pytest.skip(obstacle)


ROOT = Path(__file__).parents[1]
DISTRIBUTIONS_ENV = "ROLLMILL_DISTRIBUTIONS"
"""Folder with a wheel and a source distribution to test, as `make release` gives it; unset: they are built."""


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The file of the wheel and that of the source distribution of this checkout."""
    folder = Path(os.environ.get(DISTRIBUTIONS_ENV, tmp_path_factory.mktemp("distributions")))
    if DISTRIBUTIONS_ENV not in os.environ:
        command = [Path(sys.executable).parent / "uv", "build", "--quiet", "--out-dir", folder, ROOT]
        subprocess.run(command, check=True)
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}


VOCABULARY = 57
MAX_TOKENS = 256
LONGEST_START_S = 900.0
LONGEST_S3_START_S = 300.0
EXTENSION_FOLDER = Path(__file__).parent / "sync"
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # of 32 each: vLLM's attention on CPU knows no smaller ones
    "num_key_value_heads": 1,
    "max_position_embeddings": MAX_TOKENS,
    "initializer_range": 0.2,  # spread out: what a stale tensor changes is far above rounding
}


class ServedModel(NamedTuple):
    """A running vLLM server and the model folder it was started with."""

    url: str
    model: Path
    config: ServeConfig
    process: LaunchedProcess


@pytest.fixture(scope="session")
def save_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Save a tiny model with random weights and the character tokenizer; returns its folder."""

    def saved(kind: Any, config_kind: Any, **settings: Any) -> Path:
        import torch

        torch.manual_seed(0)
        folder = save_character_tokenizer(tmp_path_factory.mktemp("model"))
        kind(config_kind(**SIZES | settings)).save_pretrained(folder)
        return folder

    return saved


@pytest.fixture(scope="session")
def tied_model(save_tiny: Callable[..., Path]) -> Path:
    """A Qwen2 whose head is its embedding."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return save_tiny(Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def run_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., AbstractContextManager[ServedModel]]:
    """Launch a server of a model folder, and end it afterwards."""

    @contextmanager
    def running(
        model: Path, max_model_len: int = MAX_TOKENS, extra_args: tuple[str, ...] = ()
    ) -> Iterator[ServedModel]:
        extension = ("--worker-extension-cls", "repair_switch.RepairSwitch", *extra_args)
        config, port = (
            ServeConfig(dtype="float32", max_model_len=max_model_len, extra_args=extension),
            free_port(),
        )
        process = LaunchedProcess.start(
            "vLLM server",
            vllm_launch.vllm_command(config, str(model), port),
            log=tmp_path_factory.mktemp("vllm") / "vllm.log",
            env={**vllm_launch.vllm_environment(config), "PYTHONPATH": str(EXTENSION_FOLDER)},
            stop_grace_s=2.0,
        )
        served = ServedModel(f"http://127.0.0.1:{port}", model, config, process)
        try:
            asyncio.run(_started(served))
            yield served
        finally:
            process.stop_now()

    return running


@pytest.fixture(scope="session")
def vllm_server(
    run_server: Callable[[Path], AbstractContextManager[ServedModel]], tied_model: Path
) -> Iterator[ServedModel]:
    """The session's server; what its weights are depends on the tests before."""
    with run_server(tied_model) as served:
        yield served


async def _started(served: ServedModel) -> None:
    async with VllmClient(served.url, served.config) as client:
        await client.wait_until_healthy(LONGEST_START_S, served.process)
        await client.warm_up(LONGEST_START_S, served.process)


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address; requests of this session, and of what it starts with its environment, go there."""
    endpoint = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", endpoint.rpartition(":")[2]]
    log = tmp_path_factory.mktemp("s3") / "server.log"
    server = LaunchedProcess.start("S3 server", command, log=log, env={**os.environ}, stop_grace_s=1.0)
    environment = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            wait_until_it_answers(endpoint, server)
            yield endpoint
    finally:
        server.stop_now()


def wait_until_it_answers(endpoint: str, server: LaunchedProcess) -> None:
    deadline = time.monotonic() + LONGEST_S3_START_S
    while True:
        try:
            httpx.get(endpoint)
        except httpx.TransportError:
            assert server.is_running, server.log_tail()
            assert time.monotonic() < deadline, "the S3 server does not answer"
            time.sleep(0.05)
        else:
            return


@pytest.fixture(scope="module")
def bucket(s3_endpoint: str) -> str:
    """A new bucket of that server for a module: s3://BUCKET."""
    return make_bucket()


@pytest.fixture
def s3_root(s3_endpoint: str) -> str:
    """A new bucket of that server, and a prefix in it: s3://BUCKET/runs."""
    return f"{make_bucket()}/runs"


def make_bucket() -> str:
    from rollmill.tasks.store.s3.s3_objects import s3_filesystem

    bucket = f"bucket-{uuid.uuid4().hex}"
    s3_filesystem().call_s3("create_bucket", Bucket=bucket)
    return f"s3://{bucket}"
