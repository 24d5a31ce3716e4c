"""Settings of the vLLM servers."""

import re
from typing import Literal

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from rollmill.tasks.config import YEAR_S, Address, Gpu, StageConfig, choose_dtype, setting

# Arguments of vLLM that hold a key or a token, and the abbreviations that argparse accepts for them.
_SECRET_ARGUMENT = re.compile(
    r"--(ap(i(-(k(ey?)?)?)?)?|hf(-(t(o(k(en?)?)?)?)?)?|[a-z-]*(password|secret|-token|api-key))$"
)


class ServeConfig(StageConfig):
    """Settings of the vLLM servers."""

    servers: int = setting(
        1, "vLLM servers to launch on this machine, if serve.urls is empty.", ge=1, le=1024, basic=True
    )
    max_model_len: int = setting(
        4096, "Largest number of tokens of prompt and completions together.", ge=8, fixed=True, basic=True
    )
    gpu_memory_utilization: float = setting(
        0.4,
        "Share of a GPU's memory for a launched server: 0.4 leaves room for a trainer on the same GPU, 0.9 suits a "
        "dedicated GPU.",
        gt=0.0,
        lt=1.0,
        basic=True,
    )
    gpus: tuple[Gpu, ...] = setting(
        (),
        "GPUs of the launched servers, by their position among the visible ones or by UUID, such as [4,5], divided among them in "
        "this order; empty: those that the launched trainer leaves.",
    )
    share_gpus: bool = setting(
        False,
        "Launched servers may use GPUs of the launched trainer; serve.gpu_memory_utilization must leave room for it.",
    )
    sleep: bool = setting(
        False,
        "Servers free their GPU's memory while the trainer trains on it, and keep their weights in host memory (vLLM's sleep level 1). "
        "Needs serve.share_gpus and rollout.max_staleness=0.",
    )
    dtype: Literal["float32", "bfloat16"] = setting(
        choose_dtype,
        "Number format of the served weights. Default: bfloat16 if the machine where the settings are read has a GPU, else "
        "float32.",
        fixed=True,
    )
    extra_args: tuple[str, ...] = setting(
        (), "Further command-line arguments of a launched server; no key or token, since settings are shown."
    )
    python: str = setting(
        ".venv-vllm/bin/python", "Python of the environment with vLLM, for launched servers."
    )
    urls: tuple[Address, ...] = setting(
        (),
        "Addresses (http://host:port) of running vLLM servers to attach to; empty: launch serve.servers on this machine.",
    )
    request_timeout_s: float = setting(
        300.0, "Time limit of one generation request, in seconds.", gt=0.0, le=YEAR_S
    )

    @field_validator("extra_args")
    @classmethod
    def _check_arguments(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        names = [each.split("=", 1)[0].replace("_", "-") for each in arguments]
        if found := next((each for each in names if _SECRET_ARGUMENT.match(each)), ""):
            remedy = f"{found} would be stored and shown: put the key in the environment variable ROLLMILL_VLLM_API_KEY"
            raise PydanticCustomError("secret", "{remedy}", {"remedy": remedy})
        if found := next((each for each in names if each.startswith(("--data-parallel", "-dp"))), ""):
            remedy = (
                f"{found}: servers with data parallelism cannot take new weights; raise serve.servers instead"
            )
            raise PydanticCustomError("data_parallel", "{remedy}", {"remedy": remedy})
        # argparse accepts abbreviations.
        if found := next((each for each in names if each.startswith("--logp")), ""):
            remedy = f"{found}: the trainer needs the log-probabilities that tokens were sampled by, for which Rollmill sets it; remove it"
            raise PydanticCustomError("logprobs_mode", "{remedy}", {"remedy": remedy})
        return arguments
