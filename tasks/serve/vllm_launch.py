"""How a vLLM server is launched: its command line and its environment."""

import json
import math
import os
import re
import subprocess
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from rollmill.tasks.config import HeadDtype
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.processes.gpus import VISIBLE
from rollmill.tasks.processes.python_child import SAFE_PATH
from rollmill.tasks.serve.config import ServeConfig

API_KEY_ENV = "ROLLMILL_VLLM_API_KEY"
"""Environment variable that holds the API key of attached servers; unset: none."""
# Largest number of sequences that a server decodes concurrently: as many as rollout.max_in_flight by default. vLLM takes the last
# --max-num-seqs, which serve.extra_args may give.
_MAX_NUM_SEQS = "256"
# Environment variables of a CPU server and their defaults: 1 GiB of key-value cache holds the tokens of a small model, and more
# threads slow each other down on shared cores.
_CPU_RESOURCES = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
TRANSFER_BACKEND = "rollmill"
LOGPROBS_MODE = "processed_logprobs"
"""Log-probabilities are those that tokens were sampled by, the temperature applied."""
LOOPBACK = "127.0.0.1"
ROUTING_ARGUMENT = "--enable-return-routed-experts"
"""Has a server return, with every completion, which experts each token was routed to."""
FLOAT32_HEAD = ("--hf-overrides.head_dtype", "float32")
"""Has a server compute logits in float32."""
PLUGIN = "rollmill"
"""Our plugin by its name; vLLM adds the routes of plugins that VLLM_PLUGINS names, and then loads no others."""
PLUGIN_REMEDY = (
    "vLLM has not loaded Rollmill's plugin: install this version of rollmill in the environment that holds vLLM "
    "(pip install --no-deps), and have VLLM_PLUGINS name rollmill"
)
# Options that multiply a server's GPUs, and their short forms.
_PARALLEL = {
    "--tensor-parallel-size": "-tp",
    "--pipeline-parallel-size": "-pp",
    "--prefill-context-parallel-size": "-pcp",
}
# Prints the versions of vLLM's builds in the environment that runs it; importing vLLM itself takes many seconds.
_PRINT_VERSIONS = """
import importlib.metadata, json
builds = ("vllm", "vllm-cpu")
found = {each.metadata["Name"]: each.version for name in builds for each in importlib.metadata.distributions(name=name)}
print(json.dumps(found))
"""
_VERSIONS_TIMEOUT_S = 60.0
# vLLM logs what its plugins raise and starts all the same.
_PLUGIN_FAILURE = re.compile(
    r"Failed to (load|instantiate endpoint) plugin rollmill|Invalid weight transfer backend: rollmill"
)
KEEP_ALIVE_S = 60
"""The server closes an idle connection after this: long after the client last used it."""

_CPU_ARGUMENTS = (
    "--enforce-eager",
    # The model runs in the engine's process. With the default, one more process imports everything again
    # (10 CPU s), waits busily, and pins itself to a core that others use too.
    *("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"),
    # A part of a prompt makes a seeded request set its generator back, which those of a CPU cannot: the engine dies.
    "--no-enable-chunked-prefill",
)

# The sampler's small functions: compiling them takes seconds at the first request, and makes none faster.
_CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}


def vllm_command(
    config: ServeConfig,
    model: str,
    port: int,
    *,
    host: str = LOOPBACK,
    head_dtype: HeadDtype = "float32",
    returns_routing: bool = False,
    chat_template: str = "",
    chat_template_kwargs: str = "",
) -> list[str]:
    """Return the command line that starts a vLLM server of the model folder `model` on a port of the address `host`.

    `head_dtype` is that of the trainer's settings; `returns_routing` adds routed experts to completions. `chat_template` and
    `chat_template_kwargs` are the settings of rollout.

    The module is run rather than the `vllm` command: that one needs a distribution called vllm, which the
    CPU build is not. Log-probabilities are those the tokens were sampled by (temperature applied). Start it with
    `vllm_environment`, which keeps the working folder off sys.path.
    """
    return [
        config.python,
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--served-model-name", "policy"),
        *("--host", host, "--port", str(port)),
        *("--dtype", config.dtype),
        *(FLOAT32_HEAD if config.dtype == "bfloat16" and head_dtype == "float32" else ()),
        *("--max-model-len", str(config.max_model_len)),
        *("--max-num-seqs", _MAX_NUM_SEQS),
        *("--gpu-memory-utilization", str(config.gpu_memory_utilization)),
        *("--logprobs-mode", LOGPROBS_MODE),
        *("--weight-transfer-config", f'{{"backend": "{TRANSFER_BACKEND}"}}'),
        "--enable-scale-out",
        "--disable-uvicorn-access-log",
        # In development mode each open request logs the death of the engine, one exception whose traceback grows with each:
        # 225 requests wrote 413,000 lines in 27 s, in which the server was neither gone nor healthy.
        "--no-log-error-stack",
        *([ROUTING_ARGUMENT] if returns_routing else []),
        *(["--enable-sleep-mode"] if config.sleep else []),
        *(["--chat-template", chat_template] if chat_template else []),
        *(["--default-chat-template-kwargs", chat_template_kwargs] if chat_template_kwargs else []),
        *(_CPU_ARGUMENTS if is_cpu_build(config.python) else ()),
        *config.extra_args,
    ]


def vllm_environment(
    config: ServeConfig, base: Mapping[str, str] = os.environ, *, api_key: str = "", gpus: str = ""
) -> dict[str, str]:
    """Return all environment variables of a vLLM server: those of `base`, and those that configure the server.

    Variables PREFECT_* and PYTHON* are left out. Development routes are on, downloads and usage reports are off.

    Args:
        config: settings of the servers.
        base: the environment to start from.
        api_key: key that every request needs; empty: the value of the variable API_KEY_ENV, if any.
        gpus: value of CUDA_VISIBLE_DEVICES (`assign_gpus`); empty: that of `base`, if any.
    """
    ours = {name: value for name, value in base.items() if not name.startswith(("PREFECT_", "PYTHON"))}
    key = api_key or base.get(API_KEY_ENV)
    plugins = dict.fromkeys([*filter(None, base.get("VLLM_PLUGINS", "").split(",")), PLUGIN])
    return {
        **ours,
        # vLLM starts `python -m` itself, to inspect a model: no file of the working folder may shadow a module there either.
        SAFE_PATH: "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": ",".join(plugins),
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
        **{name: ours.get(name, default) for name, default in _CPU_RESOURCES.items()},
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PATH": f"{Path(config.python).absolute().parent}:{ours.get('PATH', '')}",
        **({"VLLM_API_KEY": key} if key else {}),
        **({VISIBLE: gpus} if gpus else {}),
        **(_CPU_ENVIRONMENT if is_cpu_build(config.python) else {}),
    }


def gpus_per_server(config: ServeConfig) -> int:
    """Return how many GPUs a launched server computes with: the product of what serve.extra_args has in _PARALLEL, as vLLM counts."""
    words = [word.replace("_", "-") for each in config.extra_args for word in each.split("=", 1)]
    sizes = dict.fromkeys(_PARALLEL, 1)
    for word, after in pairwise(words):
        for option, short in _PARALLEL.items():
            # argparse accepts abbreviations.
            is_meant = word == short or (len(word) > len("--") and option.startswith(word))
            if is_meant and after.isdecimal():
                sizes[option] = int(after)
    return math.prod(sizes.values())


def has_plugin_failure(log: str) -> bool:
    """Return True if a server's log reports that it did not load Rollmill's plugin."""
    return _PLUGIN_FAILURE.search(log) is not None


def check_guarded(config: ServeConfig, base: Mapping[str, str] = os.environ, *, host: str = LOOPBACK) -> None:
    """Refuse an address at which other machines can reach a server that has no API key: `host`, or one in serve.extra_args.

    vLLM accepts `--hos` for `--host`. With `--config` the address may be in a file.

    Raises:
        ConfigError: names the option or the setting.
    """
    words = [word for each in config.extra_args for word in each.split("=", 1)]
    further = [
        ("serve.extra_args", f"{word} {after}", after)
        for word, after in pairwise(words)
        if word == "--config" or (word.startswith("--ho") and "--host".startswith(word))
    ]
    for field, value, address in [("--host", host, host), *further]:
        if address != LOOPBACK and not base.get(API_KEY_ENV):
            remedy = f"others reach its control routes there: put a key in the environment variable {API_KEY_ENV}, which they need"
            raise ConfigError(field, value, remedy)


def check_python(config: ServeConfig) -> None:
    """Refuse a `serve.python` that is no Python, or whose environment has no vLLM; raises ConfigError."""
    path = Path(config.python)
    if not os.access(path, os.X_OK) or not path.is_file():
        remedy = (
            "there is no Python; create the vLLM environment with `rollmill setup`, name that of a checkout or another "
            "project (PATH/.venv-vllm/bin/python), or attach to servers with serve.urls"
        )
        raise ConfigError("serve.python", config.python, remedy)
    command = [str(path.absolute()), "-c", _PRINT_VERSIONS]
    try:
        done = subprocess.run(
            command,
            env=vllm_environment(config),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=_VERSIONS_TIMEOUT_S,
        )
        versions = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        remedy = (
            f"it is not a Python that runs ({type(error).__name__}); give that of an environment with vLLM"
        )
        raise ConfigError("serve.python", config.python, remedy) from error
    if not versions:
        remedy = "this Python's environment has no vLLM; `rollmill setup` makes one that has"
        raise ConfigError("serve.python", config.python, remedy)


def is_cpu_build(python: str) -> bool:
    """Return True if the virtual environment of the interpreter `python` has vLLM's CPU build, not the one for GPUs."""
    return any(Path(python).absolute().parent.parent.glob("lib/python*/site-packages/vllm_cpu-*.dist-info"))
