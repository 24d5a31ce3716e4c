"""Settings of the vLLM servers."""

import re
from typing import Literal

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from tasks.config import StageConfig, setting, variable

_SECRET_ARGUMENT = re.compile(
    r"--(ap(i(-(k(ey?)?)?)?)?|hf(-(t(o(k(en?)?)?)?)?)?|[a-z-]*(password|secret|-token|api-key))$"
)
"""Arguments that have a key or a token, shortened as argparse lets them be."""


class ServeConfig(StageConfig):
    urls: tuple[str, ...] = setting(
        (),
        "Addresses (http://host:port) of running vLLM servers to attach to; empty: launch serve.servers here.",
    )
    servers: int = setting(1, "vLLM servers to launch here, when serve.urls is empty.", ge=1)
    gpus: tuple[str, ...] = setting(
        (),
        "Numbers of the GPUs of the launched servers, shared out evenly in this order; empty: each sees all.",
    )
    python: str = setting(
        ".venv-vllm/bin/python", "Python of the environment that holds vLLM, for launching."
    )
    port: int = setting(
        0,
        "Loopback port of the first launched server, the next ones follow; 0: any free ones.",
        ge=0,
        le=65535,
    )
    dtype: Literal["float32", "bfloat16"] = setting("float32", "Type of the served weights.", fixed=True)
    max_model_len: int = setting(256, "Most tokens of prompt and completion together.", ge=8, fixed=True)
    max_num_seqs: int = setting(256, "Most sequences that a server decodes at once.", ge=1)
    kv_cache_gib: int = setting(1, "GiB of key-value cache of a launched CPU server.", ge=1)
    gpu_memory_utilization: float = setting(
        0.85, "Share of a GPU's memory for a launched server.", gt=0.0, lt=1.0
    )
    threads: int = setting(
        1, "CPU threads of a launched server; more spin on each other where cores are shared.", ge=1
    )
    extra_args: tuple[str, ...] = setting(
        (), "More command-line arguments for a launched server; no key or token, since settings are shown."
    )
    api_key_env: str = variable(
        "ROLLMILL_VLLM_API_KEY", "Environment variable that holds the servers' API key; unset: none."
    )
    start_timeout_s: float = setting(600.0, "Seconds a server has to become healthy.", gt=0.0)
    attach_timeout_s: float = setting(
        30.0, "Seconds, before a run starts, that addresses to attach to have to answer.", gt=0.0
    )
    rejoin_timeout_s: float = setting(
        1800.0,
        "Seconds that an attached server which failed is awaited, to answer and to take the current weights.",
        gt=0.0,
    )
    request_timeout_s: float = setting(300.0, "Seconds one generation request may take.", gt=0.0)
    connect_timeout_s: float = setting(10.0, "Seconds to open a connection, and for control calls.", gt=0.0)
    decode_threads: int = setting(
        2, "Threads that decode a server's large answers, and so how many of them are decoded at once.", ge=1
    )
    abort_grace_s: float = setting(
        2.0, "Seconds a server has to return the tokens of a request that is cut at its deadline.", gt=0.0
    )
    control_attempts: int = setting(
        4,
        "Sends of a control call that may be repeated, the first included, when the error is transient.",
        ge=1,
    )
    control_backoff_s: float = setting(
        0.2, "Seconds before a control call's second send; doubled each time, with jitter.", gt=0.0
    )
    health_interval_s: float = setting(2.0, "Seconds between two health checks of a server.", gt=0.0)
    max_failures_in_a_row: int = setting(
        5,
        "Requests in a row that a server fails before it is asked no more until it has sampled a token again.",
        ge=1,
    )
    probe_timeout_s: float = setting(
        30.0, "Seconds that a server which failed so many requests has to sample that token.", gt=0.0
    )
    max_restarts: int = setting(
        2, "How often each launched service is started again; the run stops when none is left.", ge=0
    )
    stop_grace_s: float = setting(
        5.0, "Seconds between asking a launched process to end and killing it.", ge=0.0
    )

    @field_validator("extra_args")
    @classmethod
    def _has_no_secret(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        names = [each.split("=", 1)[0].replace("_", "-") for each in arguments]
        if found := next((each for each in names if _SECRET_ARGUMENT.match(each)), ""):
            remedy = f"{found} would be stored and shown: put the key in the environment variable serve.api_key_env names"
            raise PydanticCustomError("secret", "{remedy}", {"remedy": remedy})
        return arguments
