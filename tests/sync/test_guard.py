"""Who may use a vLLM server's routes: with a key, nobody without it, on any route but those of monitors."""

from argparse import Namespace

import httpx
import pytest
from fastapi import FastAPI

from rollmill.tasks.sync.vllm_plugin.server_routes import OPEN_PATHS, KeyGuard, read_keys

ROUTES = ["/pause", "/collective_rpc", "/rollmill/weights", "/inference/v1/generate", "/server_info"]


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    for path in [*ROUTES, *OPEN_PATHS]:
        app.add_api_route(path, lambda: "done", methods=["GET", "POST"])
    app.add_middleware(KeyGuard)
    return app


async def status(app: FastAPI, path: str, key: str = "") -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        return (await client.post(path, headers=headers)).status_code


@pytest.mark.parametrize("path", ROUTES)
async def test_a_route_needs_the_key(app: FastAPI, path: str) -> None:
    app.state.rollmill_keys = ("right", "second")
    assert await status(app, path) == 401
    assert await status(app, path, "wrong") == 401
    assert await status(app, path, "right") == 200
    assert await status(app, path, "second") == 200


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
async def test_monitors_need_no_key(app: FastAPI, path: str) -> None:
    app.state.rollmill_keys = ("right",)
    assert await status(app, path) == 200


async def test_a_server_without_a_key_is_open(app: FastAPI) -> None:
    assert await status(app, "/pause") == 200


def test_keys_are_those_that_vllm_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of the environment")
    assert read_keys(Namespace(api_key=["given", ""])) == ("given",)
    assert read_keys(Namespace(api_key=None)) == ("of the environment",)
    monkeypatch.delenv("VLLM_API_KEY")
    assert read_keys(Namespace()) == ()
