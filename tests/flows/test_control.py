"""A deployed run under a real worker: cancelled and retried, paused and resumed; its secrets are stored nowhere."""

from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from aiohttp import web
from deployed_run import DEADLINE_S, ENDED, NAME, Deployed, deploy
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.settings import PREFECT_API_URL, temporary_settings
from stored_texts import read_all_texts

from rollmill.flows.collect import collect
from rollmill.flows.post_train import post_train
from rollmill.flows.prefect_integration.work_pools import put_automations, read_automations
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.store.verify.run_verification import verify_run

pytestmark = pytest.mark.service

ENDLESS = {"steps": 3000}
SECRETS = {
    "AWS_ACCESS_KEY_ID": "planted-access-key",
    "AWS_SECRET_ACCESS_KEY": "planted-secret-of-s3",
    "PREFECT_API_AUTH_STRING": "me:planted-password-of-prefect",
    "MLFLOW_TRACKING_PASSWORD": "planted-password-of-mlflow",
    "JUDGE_KEY": "planted-key-of-the-judge",
}
OF_SERVICES = ("VLLM_API_KEY", "ROLLMILL_TRAINER_TOKEN")
"""Variables in which launched services get the keys that were made for them."""


@pytest.fixture(autouse=True)
def _server(prefect_api: str) -> Any:
    with temporary_settings({PREFECT_API_URL: prefect_api}):
        yield


@pytest.fixture
async def judge() -> AsyncIterator[tuple[str, set[str]]]:
    """The address of an endpoint that gives rewards in turn, and the keys that it was shown."""
    shown: set[str] = set()
    n_asked = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal n_asked
        n_asked += 1
        shown.add(request.headers.get("Authorization", ""))
        said = {"message": {"content": f'{{"score": {n_asked % 2}}}'}, "finish_reason": "stop"}
        return web.json_response({"choices": [said]})

    port, app = free_port(), web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield f"http://127.0.0.1:{port}/v1", shown
    await runner.cleanup()


async def test_a_run_on_s3_that_is_cancelled_while_it_samples_is_finished_by_retry_and_stores_no_secret(
    workplace: Any,
    stub_python: str,
    set_stub: Any,
    s3_root: str,
    judge: tuple[str, set[str]],
) -> None:
    workplace.environment |= SECRETS
    url, shown = judge
    settings = {
        "steps": 5,
        "serve": {"python": stub_python},
        "store": {"root": s3_root},
        "score": {"scorer": "judge", "judge": {"url": url, "model": "any", "api_key_env": "JUDGE_KEY"}},
    }
    async with deploy(workplace, collect, **settings) as run:
        with workplace.worker(run.pool):
            flow_run = await run.start()
            await run.when_steps(flow_run, 1)
            set_stub(rollout_s=DEADLINE_S)
            await run.when_task_run(flow_run, "rollout")
            secrets = SECRETS | keys_of_services(run)
            await run.cancelled(flow_run)
            assert not verify_run(run.folder).findings
            states = await run.work(flow_run)
            assert {"Completed", "Cancelled"} <= states <= ENDED

            set_stub()
            await run.retried(flow_run)
            assert await run.when_over(flow_run) == StateType.COMPLETED, run.log()
        assert run.steps() == 5
        assert not verify_run(run.folder).findings
        assert shown == {f"Bearer {SECRETS['JUDGE_KEY']}"}
        await check_no_secret(run, flow_run, secrets)


@pytest.mark.long
async def test_a_paused_run_ends_between_two_steps_and_a_resumed_one_runs_until_it_is_cancelled(
    workplace: Any,
) -> None:
    workplace.environment |= SECRETS
    async with deploy(workplace, post_train, **ENDLESS) as run:
        with workplace.worker(run.pool):
            flow_run = await run.start()
            await run.when_steps(flow_run, 2)
            await check_keys(run)
            secrets = SECRETS | keys_of_services(run)
            assert secrets.keys() >= {f"{name} of a service" for name in OF_SERVICES}
            timeout = (datetime.now(UTC) + timedelta(seconds=300)).isoformat()
            await run.set(flow_run, "PAUSED", "Suspended", pause_timeout=timeout, pause_reschedule=True)
            await run.when(flow_run, lambda _: not run.of_run())
            n_steps = run.steps()
            assert (await run.client.read_flow_run(flow_run)).state_name == "Suspended"
            assert "paused before step" in run.log()
            assert not verify_run(run.folder).findings

            await run.client.resume_flow_run(flow_run)
            await run.when_steps(flow_run, n_steps + 1)
            await run.cancelled(flow_run)
            assert not verify_run(run.folder).findings
            assert await run.work(flow_run) <= ENDED
            await check_no_secret(run, flow_run, secrets)


async def test_an_automation_is_put_once() -> None:
    for _ in range(2):
        await put_automations(read_automations())
    async with get_client() as client:
        (found,) = await client.read_automations_by_name(read_automations()[0].name)
    assert found.enabled


async def check_keys(run: Deployed) -> None:
    """The launched services answer nobody without their keys."""
    lines = [line for line in run.of_run().values() if "api_server" in line and " --port " in line]
    port = lines[0].partition(" --port ")[2].split()[0]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as client:
        for path in ("/pause", "/rollmill/weights", "/inference/v1/generate"):
            assert (await client.post(path)).status_code == 401
        assert (await client.get("/health")).status_code == 200


def keys_of_services(run: Deployed) -> dict[str, str]:
    """The keys that the run made for the services it launched, as these have them."""
    found = {}
    for pid in run.of_run():
        try:
            variables = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
        except OSError:
            continue  # it ended meanwhile
        of_process = dict(each.partition("=")[::2] for each in variables)
        found |= {f"{name} of a service": of_process[name] for name in OF_SERVICES if name in of_process}
    assert found, "no launched service has a key"
    return found


async def check_no_secret(run: Deployed, flow_run: UUID, secrets: Mapping[str, str]) -> None:
    """No secret is in anything that is kept of a run, of which there is something of each kind."""
    kept = await read_all_texts(run, flow_run)
    for kind, contents in kept.items():
        of_run = [each for each in contents if NAME.encode() in each or str(flow_run).encode() in each]
        assert of_run, f"none of the run's {kind} were found"
    stored = {
        (kind, name)
        for kind, contents in kept.items()
        for name, secret in secrets.items()
        if any(secret.encode() in each for each in contents)
    }
    assert stored == set()
