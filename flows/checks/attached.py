"""Are the services there that a run attaches to, and have they what it needs? Asked before anything is started."""

import asyncio
import os
from collections.abc import Collection
from http import HTTPStatus

import msgspec

from flows.config import RunConfig
from tasks.errors import ConfigError, RequestError, TransientRequestError
from tasks.serve.connection import TRANSIENT_STATUSES, Connection
from tasks.serve.vllm import LOGPROBS_MODE, TRANSFER_BACKEND

LOOK_AGAIN_S = 0.5


class _Model(msgspec.Struct):
    max_model_len: int
    logprobs_mode: str


class _Transfer(msgspec.Struct):
    backend: str


class _Settings(msgspec.Struct):
    model_config: _Model
    weight_transfer_config: _Transfer | None = None


class _Served(msgspec.Struct):
    max_model_len: int


class _Models(msgspec.Struct):
    data: list[_Served]


class _Info(msgspec.Struct):
    vllm_config: _Settings


async def check_attached(config: RunConfig, *, samples: bool = True, trains: bool = True) -> None:
    """Ask every service that a run attaches to whether it can serve it.

    Those are at train.url and train.kl.urls, if it trains, and at serve.urls, if it samples.

    Raises:
        ConfigError: one is not there within serve.attach_timeout_s, or lacks something; names the setting.
    """
    urls = [("serve.urls", url) for url in config.serve.urls if samples]
    if trains and config.train.kl.reference == "deployment":
        urls += [("train.kl.urls", url) for url in config.train.kl.urls]
    urls += [("train.url", config.train.url)] if trains and config.train.url else []
    await asyncio.gather(*(_check(config, field, url) for field, url in urls))


async def _check(config: RunConfig, field: str, url: str) -> None:
    key_env = config.train.token_env if field == "train.url" else config.serve.api_key_env
    connect_s = config.serve.connect_timeout_s
    connection = Connection(url, api_key=os.environ.get(key_env, ""), connect_timeout_s=connect_s)
    try:
        async with asyncio.timeout(config.serve.attach_timeout_s):
            if field == "train.url":
                await _check_trainer(config, connection)
            elif field == "train.kl.urls":
                await _check_reference(config, url, connection)
            else:
                await _check_vllm(config, url, connection)
    except TimeoutError:
        within = f"within serve.attach_timeout_s = {config.serve.attach_timeout_s:g} s"
        raise ConfigError(
            field,
            url,
            f"nothing answers there {within}, or what does is not ready; start it, or correct the address",
        ) from None
    except RequestError as error:
        raise ConfigError(field, url, str(error)) from error
    finally:
        await connection.close()


async def _check_trainer(config: RunConfig, connection: Connection) -> None:
    status, _ = await _answer(connection, "GET", "/v1/health", config.serve.connect_timeout_s)
    if status == HTTPStatus.UNAUTHORIZED:
        remedy = f"the trainer at {config.train.url} has another access token than this environment variable"
        raise ConfigError("train.token_env", config.train.token_env, remedy)
    if status != HTTPStatus.OK:
        raise ConfigError(
            "train.url", config.train.url, f"what answers there is no trainer (/v1/health: {status})"
        )


async def _ask_to_generate(config: RunConfig, url: str, connection: Connection) -> int:
    """The HTTP status of an empty request to sample, of a healthy server whose API key is ours."""
    connect_s = config.serve.connect_timeout_s
    await _answer(connection, "GET", "/health", connect_s)
    generate, _ = await _answer(connection, "POST", "/inference/v1/generate", connect_s)
    if generate == HTTPStatus.UNAUTHORIZED:
        remedy = f"the vLLM server at {url} has another API key than this environment variable"
        raise ConfigError("serve.api_key_env", config.serve.api_key_env, remedy)
    return generate


async def _check_reference(config: RunConfig, url: str, connection: Connection) -> None:
    """Refuse what cannot give the log-probabilities of a longest sequence, which it is asked for as a prompt."""
    generate = await _ask_to_generate(config, url, connection)
    status, body = await _answer(connection, "GET", "/v1/models", config.serve.connect_timeout_s)
    needed = config.serve.max_model_len + 1
    try:
        longest = min(each.max_model_len for each in msgspec.json.decode(body, type=_Models).data)
    except (msgspec.DecodeError, ValueError):
        remedy = f"what answers there is no vLLM server (/v1/models: {status})"
        raise ConfigError("train.kl.urls", url, remedy) from None
    if generate == HTTPStatus.NOT_FOUND:
        raise ConfigError("train.kl.urls", url, "start the reference's server with --enable-scale-out")
    if longest < needed:
        remedy = (
            f"start the reference's server with --max-model-len {needed}: a sequence, and a token more; where the model "
            "itself ends below, with VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 in its environment too"
        )
        raise ConfigError("train.kl.urls", url, remedy)


async def _check_vllm(config: RunConfig, url: str, connection: Connection) -> None:
    generate = await _ask_to_generate(config, url, connection)
    info, body = await _answer(
        connection,
        "GET",
        "/server_info?config_format=json",
        config.serve.attach_timeout_s,
        final={HTTPStatus.INTERNAL_SERVER_ERROR},
    )
    if missing := _missing(config, generate, info, body):
        raise ConfigError(
            "serve.urls", url, f"what answers there is no vLLM server for a run: start it {missing}"
        )


def _missing(config: RunConfig, generate: int, info: int, body: bytes) -> str:
    """How a vLLM server must be started that is not as a run needs it; empty when it is, or cannot be told.

    vLLM lists the installed packages in the account of its settings, and fails (500) where neither pip nor uv
    can be called; what is wrong is then seen at the first sync.

    Args:
        config: settings of the run.
        generate: status of a generation request without a body; 404: there is no such route.
        info: status of the server's account of its settings.
        body: that account.
    """
    if generate == HTTPStatus.NOT_FOUND:
        return "with --enable-scale-out"
    if info == HTTPStatus.NOT_FOUND:
        return "with VLLM_SERVER_DEV_MODE=1 in its environment"
    if info == HTTPStatus.INTERNAL_SERVER_ERROR:
        return ""
    try:
        settings = msgspec.json.decode(body, type=_Info).vllm_config
    except msgspec.DecodeError:
        return f"anew: /server_info answers {info}, without its settings"
    backend = settings.weight_transfer_config.backend if settings.weight_transfer_config else ""
    if backend != TRANSFER_BACKEND:
        return f"""with --weight-transfer-config '{{"backend": "{TRANSFER_BACKEND}"}}'"""
    if settings.model_config.logprobs_mode != LOGPROBS_MODE:
        return f"with --logprobs-mode {LOGPROBS_MODE}"
    if settings.model_config.max_model_len < config.serve.max_model_len:
        return f"with --max-model-len {config.serve.max_model_len} or more, as serve.max_model_len"
    return ""


async def _answer(
    connection: Connection, method: str, path: str, timeout_s: float, final: Collection[int] = ()
) -> tuple[int, bytes]:
    """The status and the body of the first answer that is not a busy server's: one that is starting is waited for.

    Args:
        connection: to the server.
        method: of the request.
        path: of the request.
        timeout_s: seconds for one answer.
        final: statuses of a busy server that are an answer here.
    """
    while True:
        try:
            status, answer = await connection.ask(method, path, b"{}" if method == "POST" else b"", timeout_s)
        except TransientRequestError:
            status, answer = HTTPStatus.SERVICE_UNAVAILABLE, b""
        if status not in TRANSIENT_STATUSES or status in final:
            return status, bytes(answer)
        await asyncio.sleep(LOOK_AGAIN_S)
