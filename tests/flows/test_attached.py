"""Checks of the services that a run attaches to, before anything starts; they are stubs in one small server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from msgspec import to_builtins

from rollmill.flows.checks import attached as attached_services
from rollmill.flows.checks.attached import check_attached
from rollmill.flows.configuration.config import RunConfig
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.train.service.answers import TrainerHealth
from tests.stubs.toy_settings import validate_toy

SETTINGS = {
    "model_config": {"max_model_len": 256, "logprobs_mode": "processed_logprobs", "more": 1},
    "weight_transfer_config": {"backend": "rollmill"},
}
Route = tuple[int, Any]
Serve = Callable[..., AbstractAsyncContextManager[str]]


@pytest.fixture
def serve() -> Serve:
    """A server of routes with fixed answers; 404 elsewhere."""

    @asynccontextmanager
    async def serving(routes: dict[str, Route], url: str = "") -> AsyncIterator[str]:
        async def answer(request: web.Request) -> web.Response:
            status, body = routes.get(request.path, (404, {}))
            return web.json_response(body, status=status)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        url = url or f"http://127.0.0.1:{free_port()}"
        await web.TCPSite(runner, "127.0.0.1", int(url.rpartition(":")[2])).start()
        try:
            yield url
        finally:
            await runner.cleanup()

    return serving


def vllm(settings: dict[str, Any] | None = None, **routes: Route) -> dict[str, Route]:
    """A vLLM server as a run needs it, but for `settings` and `routes` (health, generate, info, weights)."""
    answers: dict[str, Route] = {
        "health": (200, {}),
        "generate": (400, {}),
        "info": (200, {"vllm_config": SETTINGS | (settings or {})}),
        "weights": (200, {}),
    } | routes
    paths = {"health": "/health", "generate": "/inference/v1/generate", "info": "/server_info"} | {
        "weights": "/rollmill/weights"
    }
    return {paths[name]: answer for name, answer in answers.items()}


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached_services, "ATTACH_TIMEOUT_S", 0.2)


def attach_run(**urls: Any) -> RunConfig:
    serve = {"urls": urls.get("serve", ())}
    train = {"url": urls.get("train", "")}
    return validate_toy({"serve": serve, "train": train})


async def refusal(config: RunConfig) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        await check_attached(config)
    return refused.value


async def test_services_that_have_what_a_run_needs_are_accepted(serve: Serve) -> None:
    health = to_builtins(TrainerHealth("", 0, -1, "", 1, [0.0], "", {}, "cpu"))
    async with serve(vllm()) as url, serve({"/v1/health": (200, health)}) as trainer:
        await check_attached(attach_run(serve=[url], train=trainer))


async def test_a_server_that_cannot_say_how_it_was_started_is_accepted(serve: Serve) -> None:
    """vLLM's /server_info fails where it finds neither pip nor uv."""
    async with serve(vllm(info=(500, {}))) as url:
        await check_attached(attach_run(serve=[url]))


async def test_a_server_that_cannot_take_weights_is_refused_with_its_reason(serve: Serve) -> None:
    reason = {"error": {"message": "it has 2 replicas (data parallelism), which cannot take new weights"}}
    async with serve(vllm(weights=(409, reason))) as url:
        error = await refusal(attach_run(serve=[url]))
    assert (error.field, error.value) == ("serve.urls", url)
    assert "it has 2 replicas (data parallelism)" in error.remedy


@pytest.mark.usefixtures("_impatient")
async def test_an_address_without_an_answer_is_an_error_with_setting_address_and_waiting_time(
    serve: Serve,
) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    async with serve(vllm()) as url:
        error = await refusal(attach_run(serve=[nowhere, url]))
    assert (error.field, error.value) == ("serve.urls", nowhere)
    assert "within 0.2 s" in error.remedy
    assert (await refusal(attach_run(train=nowhere))).field == "train.url"


async def test_an_invalid_address_is_refused_at_once() -> None:
    error = await refusal(attach_run(serve=["http://"]))
    assert error.field == "serve.urls"


async def test_a_server_that_is_still_starting_is_waited_for(serve: Serve) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    checking = asyncio.ensure_future(check_attached(attach_run(serve=[url])))
    await asyncio.sleep(0.1)
    assert not checking.done()
    async with serve(vllm(), url):
        await checking


@pytest.mark.usefixtures("_impatient")
async def test_a_server_whose_engine_is_dead_is_not_accepted(serve: Serve) -> None:
    async with serve(vllm(health=(503, {}))) as url:
        assert "no service answers" in (await refusal(attach_run(serve=[url]))).remedy


@pytest.mark.parametrize(
    ("routes", "remedy"),
    [
        (vllm(generate=(404, {})), "--enable-scale-out"),
        (vllm(info=(404, {})), "VLLM_SERVER_DEV_MODE=1"),
        (vllm(weights=(404, {})), "has not loaded Rollmill's plugin"),
        (vllm(info=(200, {"vllm_config": {}})), "/server_info"),
        (vllm({"weight_transfer_config": None}), '--weight-transfer-config \'{"backend": "rollmill"}\''),
        (vllm({"weight_transfer_config": {"backend": "nccl"}}), '"rollmill"'),
        (
            vllm({"model_config": SETTINGS["model_config"] | {"logprobs_mode": "raw_logprobs"}}),
            "--logprobs-mode",
        ),
        (vllm({"model_config": SETTINGS["model_config"] | {"max_model_len": 8}}), "--max-model-len 256"),
    ],
)
async def test_a_server_started_otherwise_is_refused_with_what_it_lacks(
    serve: Serve, routes: dict[str, Route], remedy: str
) -> None:
    async with serve(routes) as url:
        error = await refusal(attach_run(serve=[url]))
    assert (error.field, error.value) == ("serve.urls", url)
    assert remedy in error.remedy


async def test_a_wrong_key_names_the_variable_that_holds_it(serve: Serve) -> None:
    async with serve(vllm(generate=(401, {}))) as url:
        assert (await refusal(attach_run(serve=[url]))).field == "ROLLMILL_VLLM_API_KEY"
    async with serve({"/v1/health": (401, {})}) as trainer:
        assert (await refusal(attach_run(train=trainer))).field == "ROLLMILL_TRAINER_TOKEN"


def reference(url: str) -> RunConfig:
    kl = {"reference": "deployment", "urls": (url,)}
    return validate_toy({"train": {"kl": kl}})


@pytest.mark.parametrize(
    ("longest", "generate", "remedy"),
    [(256, 400, "--max-model-len 257"), (257, 404, "--enable-scale-out"), (257, 400, "")],
)
async def test_a_reference_server_must_score_a_longest_sequence(
    serve: Serve, longest: int, generate: int, remedy: str
) -> None:
    routes = vllm(generate=(generate, {})) | {"/v1/models": (200, {"data": [{"max_model_len": longest}]})}
    async with serve(routes) as url:
        if not remedy:
            await check_attached(reference(url))
            return
        error = await refusal(reference(url))
    assert (error.field, error.value) == ("train.kl.urls", url)
    assert remedy in error.remedy


async def test_a_service_that_is_no_trainer_is_refused(serve: Serve) -> None:
    async with serve({}) as url:
        assert (await refusal(attach_run(train=url))).field == "train.url"
    # Some services answer every path, such as Prefect's UI.
    async with serve({"/v1/health": (200, "a page")}) as url:
        error = await refusal(attach_run(train=url))
    assert (error.field, error.value) == ("train.url", url)
    assert "is not a trainer" in error.remedy
