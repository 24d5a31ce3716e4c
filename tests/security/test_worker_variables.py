"""Code that runs in workers of environments and scorers sees the variables that it needs, and no secrets unless they are named."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollmill.flows.configuration.settings import validate
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment import Example
from rollmill.tasks.rollout.remote_environment import open_environment
from rollmill.tasks.score.call_slots import CallSlots
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.score_worker_pool import ScoreWorkerPool
from rollmill.tasks.score.scorer import CandidateText
from rollmill.tasks.user_code.worker_process import select_user_variables

TIMEOUT_S = 120.0
NEEDED = {
    "CUDA_VISIBLE_DEVICES": "0",
    "HF_HOME": "/cache",
    "ROLLMILL_SCRATCH": "/scratch",
    "no_proxy": "localhost",
}
SECRET = {
    "FTP_PROXY": "user:planted@proxy:3128",
    "AWS_SECRET_ACCESS_KEY": "planted",
    "HF_TOKEN": "planted",
    "JUDGE_API_KEY": "planted",
    "PREFECT_API_AUTH_STRING": "planted",
    "ROLLMILL_JUDGE": "planted",
    "ROLLMILL_JUDGE_APIKEY": "planted",
    "ROLLMILL_PASSPHRASE": "planted",
    "ROLLMILL_TRAINER_TOKEN": "planted",
    "ROLLMILL_VLLM_API_KEY": "planted",
    "HTTPS_PROXY": "http://me:planted@proxy",
    "MY_DATA": "planted",
}


@pytest.fixture(autouse=True)
def _planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    for name, value in (NEEDED | SECRET).items():
        monkeypatch.setenv(name, value)


async def seen_by_environment(folder: Path, names: Sequence[str]) -> dict[str, str]:
    config = RolloutConfig(
        environment="planted_variables:Variables", env_workers=1, env_variables=tuple(names)
    )
    async with open_environment(config, logs=folder) as environment:
        episode = environment.episode(Example("0", {}), seed=0)
        (message,) = await episode.reply(())
        await episode.close()
    found: dict[str, str] = json.loads(message.content)
    return found


async def test_environment_has_what_it_needs_and_no_secret(tmp_path: Path) -> None:
    found = await seen_by_environment(tmp_path, ())
    assert found.items() >= (NEEDED | {"PYTHONUNBUFFERED": "1"}).items()
    assert {"PATH", "HOME"} <= found.keys()
    assert not SECRET.keys() & found.keys()


async def test_environment_has_the_variables_that_are_named(tmp_path: Path) -> None:
    found = await seen_by_environment(tmp_path, ("JUDGE_API_KEY", "AWS_*"))
    assert SECRET.keys() & found.keys() == {"JUDGE_API_KEY", "AWS_SECRET_ACCESS_KEY"}


@pytest.mark.parametrize(("names", "expected"), [((), set()), (("MY_DATA",), {"MY_DATA"})])
async def test_scorer_has_the_variables_that_are_named(names: tuple[str, ...], expected: set[str]) -> None:
    load, settings = CallSlots("score", 1), ScoreConfig().model_dump_json().encode()
    candidate = CandidateText("t", "e", "complete", "{}", "[]", "{}", 1)
    pool = ScoreWorkerPool([("planted_variables:score", {})], settings, 1, TIMEOUT_S, load, names)
    async with pool, load.slot():
        ((verdict,),) = await pool.call(0, [[candidate]], TIMEOUT_S)
    found = verdict.components.keys()
    assert NEEDED.keys() <= found
    assert SECRET.keys() & found == expected


def test_a_star_names_all_variables() -> None:
    assert select_user_variables(["*"], SECRET) == SECRET
    assert select_user_variables(["MY_*"], SECRET) == {"MY_DATA": "planted"}


@pytest.mark.parametrize("given", ["MY_KEY=planted-secret", "sk-planted-secret", "A*B", ""])
def test_a_value_in_the_place_of_a_variables_name_is_refused_unshown(given: str) -> None:
    with pytest.raises(ConfigError, match="names of environment variables") as refused:
        validate({"rollout": {"env_variables": [given]}})
    assert refused.value.field == "rollout.env_variables.0"
    assert "planted-secret" not in str(refused.value)
