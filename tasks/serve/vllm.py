"""How a vLLM server is launched: its command line and its environment."""

import os
from collections.abc import Mapping
from pathlib import Path

from tasks.serve.config import ServeConfig

WEIGHT_TRANSFER = '{"backend": "gloo"}'
LOOPBACK = "127.0.0.1"


def command(config: ServeConfig, model: str, port: int) -> list[str]:
    """The words that start a server of the model folder `model` on a loopback port.

    The module is run rather than the `vllm` command: that one needs a distribution called vllm, which the
    CPU build is not. Log-probabilities are those the tokens were sampled by (temperature applied).
    """
    return [
        config.python,
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--served-model-name", "policy"),
        *("--host", LOOPBACK, "--port", str(port)),
        *("--dtype", config.dtype),
        *("--max-model-len", str(config.max_model_len)),
        *("--max-num-seqs", str(config.max_num_seqs)),
        *("--gpu-memory-utilization", str(config.gpu_memory_utilization)),
        *("--logprobs-mode", "processed_logprobs"),
        *("--weight-transfer-config", WEIGHT_TRANSFER),
        "--enable-scale-out",
        "--enforce-eager",
        "--disable-uvicorn-access-log",
        *config.extra_args,
    ]


def environment(config: ServeConfig, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The server's whole environment: ours, its development routes (on loopback), no downloads, no usage reports."""
    ours = {name: value for name, value in base.items() if not name.startswith(("PREFECT_", "PYTHON"))}
    key = base.get(config.api_key_env)
    return {
        **ours,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PATH": f"{Path(config.python).absolute().parent}:{ours.get('PATH', '')}",
        **({"VLLM_API_KEY": key} if key else {}),
    }
