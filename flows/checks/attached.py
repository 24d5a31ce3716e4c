"""Checks of the running services that a run attaches to: trainer, vLLM servers, reference servers."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec

from rollmill.flows.configuration.config import AnnotateConfig, RunConfig
from rollmill.flows.configuration.settings import HIDDEN
from rollmill.tasks.errors import ConfigError, RequestError, TransientRequestError
from rollmill.tasks.serve.config import ServeConfig
from rollmill.tasks.serve.http_connection import TRANSIENT_STATUSES, HttpConnection
from rollmill.tasks.serve.vllm_client import PATIENCE
from rollmill.tasks.serve.vllm_launch import API_KEY_ENV, LOGPROBS_MODE, PLUGIN_REMEDY, TRANSFER_BACKEND
from rollmill.tasks.train.service.answers import TrainerHealth
from rollmill.tasks.train.service.launch import TOKEN_ENV

RETRY_INTERVAL_S = 0.5
# Seconds before a run starts in which an address must answer: a service may be starting, and a wrong address must soon be named.
ATTACH_TIMEOUT_S = 60.0


class _ModelConfig(msgspec.Struct):
    max_model_len: int
    logprobs_mode: str


class _Transfer(msgspec.Struct):
    backend: str


class _Settings(msgspec.Struct):
    model_config: _ModelConfig
    weight_transfer_config: _Transfer | None = None


class _Served(msgspec.Struct):
    max_model_len: int


class _Models(msgspec.Struct):
    data: list[_Served]


_CONNECT_S = PATIENCE.connect_timeout_s


class _Info(msgspec.Struct):
    vllm_config: _Settings


async def check_attached(config: RunConfig, *, samples: bool = True, trains: bool = True) -> None:
    """Check every service that a run attaches to: train.url and train.kl.urls if it trains, serve.urls if it samples.

    Raises:
        ConfigError: one does not answer within ATTACH_TIMEOUT_S or lacks something; names the setting.
    """
    checks = [
        _check("serve.urls", url, partial(_check_vllm, config, url)) for url in config.serve.urls if samples
    ]
    if trains and config.train.kl.reference == "deployment":
        checks += _reference_checks("train.kl.urls", config.train.kl.urls, config.serve)
    if trains and config.train.url:
        checks.append(_check("train.url", config.train.url, partial(_check_trainer, config)))
    await asyncio.gather(*checks)


async def check_teacher_servers(config: AnnotateConfig) -> None:
    """Check the running vLLM servers of a teacher, at serve.urls; errors as for `check_attached`."""
    await asyncio.gather(*_reference_checks("serve.urls", config.serve.urls, config.serve))


def _reference_checks(field: str, urls: Sequence[str], serve: ServeConfig) -> list[Coroutine[Any, Any, None]]:
    return [_check(field, url, partial(_check_reference, field, url, serve.max_model_len)) for url in urls]


async def _check(field: str, url: str, check: Callable[[HttpConnection], Awaitable[None]]) -> None:
    key_env = TOKEN_ENV if field == "train.url" else API_KEY_ENV
    connection = HttpConnection(url, api_key=os.environ.get(key_env, ""), connect_timeout_s=_CONNECT_S)
    try:
        async with asyncio.timeout(ATTACH_TIMEOUT_S):
            await check(connection)
    except TimeoutError:
        within = f"within {ATTACH_TIMEOUT_S:g} s"
        raise ConfigError(
            field,
            url,
            f"no service answers there, or it is not ready, {within}; start it, or correct the address",
        ) from None
    except RequestError as error:
        raise ConfigError(field, url, str(error)) from error
    finally:
        await connection.close()


async def _check_trainer(config: RunConfig, connection: HttpConnection) -> None:
    status, body = await _answer(connection, "GET", "/v1/health", _CONNECT_S)
    if status == HTTPStatus.UNAUTHORIZED:
        remedy = (
            f"the trainer at {config.train.url} has a different access token than this environment variable"
        )
        raise ConfigError(TOKEN_ENV, HIDDEN, remedy)
    if status != HTTPStatus.OK:
        raise ConfigError(
            "train.url", config.train.url, f"the service there is not a trainer (/v1/health: {status})"
        )
    try:
        msgspec.json.decode(body, type=TrainerHealth)
    except msgspec.DecodeError as error:
        remedy = f"the service there is not a trainer, or one of another version (/v1/health: {error})"
        raise ConfigError("train.url", config.train.url, remedy) from error


async def _ask_to_generate(url: str, connection: HttpConnection) -> int:
    """Wait until a server is healthy; returns the HTTP status of an empty generation request.

    Raises:
        ConfigError: the server refuses our API key.
    """
    await _answer(connection, "GET", "/health", _CONNECT_S)
    # A server with the route refuses the empty request as invalid (400), one without it answers 404.
    generate, _ = await _answer(connection, "POST", "/inference/v1/generate", _CONNECT_S)
    if generate == HTTPStatus.UNAUTHORIZED:
        remedy = f"the vLLM server at {url} has a different API key than this environment variable"
        raise ConfigError(API_KEY_ENV, HIDDEN, remedy)
    return generate


async def _check_reference(field: str, url: str, max_tokens: int, connection: HttpConnection) -> None:
    """Raise ConfigError if a reference server cannot return the log-probabilities of a sequence of `max_tokens` tokens."""
    generate = await _ask_to_generate(url, connection)
    status, body = await _answer(connection, "GET", "/v1/models", _CONNECT_S)
    # vLLM samples at least one token after a prompt.
    needed = max_tokens + 1
    try:
        longest = min(each.max_model_len for each in msgspec.json.decode(body, type=_Models).data)
    except (msgspec.DecodeError, ValueError):
        remedy = f"the service there is not a vLLM server (/v1/models: {status})"
        raise ConfigError(field, url, remedy) from None
    if generate == HTTPStatus.NOT_FOUND:
        raise ConfigError(field, url, "start the reference server with --enable-scale-out")
    if longest < needed:
        remedy = (
            f"start the reference server with --max-model-len {needed}: the longest sequence and one more token; if the "
            "model's own limit is lower, set VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 in its environment too"
        )
        raise ConfigError(field, url, remedy)


async def _check_vllm(config: RunConfig, url: str, connection: HttpConnection) -> None:
    generate = await _ask_to_generate(url, connection)
    info, body = await _answer(
        connection,
        "GET",
        "/server_info?config_format=json",
        ATTACH_TIMEOUT_S,
        final={HTTPStatus.INTERNAL_SERVER_ERROR},
    )
    if missing := _missing(config, generate, info, body):
        raise ConfigError("serve.urls", url, f"this vLLM server cannot serve a run: start it {missing}")
    conflict = {HTTPStatus.CONFLICT}
    weights, reason = await _answer(connection, "GET", "/rollmill/weights", ATTACH_TIMEOUT_S, final=conflict)
    if weights == HTTPStatus.NOT_FOUND:
        raise ConfigError("serve.urls", url, PLUGIN_REMEDY)
    if weights == HTTPStatus.CONFLICT:
        raise ConfigError("serve.urls", url, reason.decode(errors="replace"))


def _missing(config: RunConfig, generate: int, info: int, body: bytes) -> str:
    """Return the option or variable that a vLLM server must be started with to fit the run; empty if it fits or is unknown.

    vLLM lists the installed packages with its settings, and fails (500) if it finds neither pip nor uv; wrong settings then
    show at the first sync.

    Args:
        config: settings of the run.
        generate: HTTP status of an empty generation request; 404: there is no such route.
        info: HTTP status of the request for the server's settings.
        body: the server's settings.
    """
    if generate == HTTPStatus.NOT_FOUND:
        return "with --enable-scale-out"
    # vLLM shows its settings only in development mode.
    if info == HTTPStatus.NOT_FOUND:
        return "with VLLM_SERVER_DEV_MODE=1 in its environment"
    if info == HTTPStatus.INTERNAL_SERVER_ERROR:
        return ""
    try:
        settings = msgspec.json.decode(body, type=_Info).vllm_config
    except msgspec.DecodeError:
        return f"again: /server_info answered {info}, without its settings"
    backend = settings.weight_transfer_config.backend if settings.weight_transfer_config else ""
    if backend != TRANSFER_BACKEND:
        return f"""with --weight-transfer-config '{{"backend": "{TRANSFER_BACKEND}"}}'"""
    if settings.model_config.logprobs_mode != LOGPROBS_MODE:
        return f"with --logprobs-mode {LOGPROBS_MODE}"
    if settings.model_config.max_model_len < config.serve.max_model_len:
        return f"with --max-model-len {config.serve.max_model_len} or more, as serve.max_model_len"
    return ""


async def _answer(
    connection: HttpConnection, method: str, path: str, timeout_s: float, final: Collection[int] = ()
) -> tuple[int, bytes]:
    """Send a request until a server responds other than "busy", and return the status and body of that response.

    Args:
        connection: to the server.
        method: of the request.
        path: of the request.
        timeout_s: seconds for one response.
        final: statuses that count as a response although they mean "busy" elsewhere.
    """
    while True:
        try:
            status, answer = await connection.ask(method, path, b"{}" if method == "POST" else b"", timeout_s)
        except TransientRequestError:
            status, answer = HTTPStatus.SERVICE_UNAVAILABLE, b""
        if status not in TRANSIENT_STATUSES or status in final:
            return status, bytes(answer)
        await asyncio.sleep(RETRY_INTERVAL_S)
