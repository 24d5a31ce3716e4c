"""An environment in worker processes: whatever one of them does, the others and the flow continue."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

import psutil
import pytest

from rollmill.tasks.errors import (
    EpisodeTimeoutError,
    ForeignError,
    ServiceDiedError,
    ServiceStartError,
    WorkerDiedError,
    WorkerKilledError,
)
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment import Example, Message
from rollmill.tasks.rollout.environment_calls import EpisodeState, read_episode_state, state_columns
from rollmill.tasks.rollout.environment_pool import MAX_RESTARTS
from rollmill.tasks.rollout.remote_environment import RemoteEnvironment, open_environment

HERE = Path(__file__).parent
TIMEOUT_S, PATIENCE_S = 2.0, 60.0


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("ROLLMILL_PLANTED_BLOCKS", str(tmp_path / "blocks"))


def open_remote(
    logs: Path, name: str = "Planted", *, n_workers: int = 2, **settings: object
) -> AbstractAsyncContextManager[RemoteEnvironment]:
    values: dict[str, object] = {
        "environment": f"planted:{name}",
        "env_workers": n_workers,
        "env_timeout_s": PATIENCE_S,
        "env_variables": ["ROLLMILL_PLANTED_BLOCKS"],
    }
    config = RolloutConfig.model_validate(values | settings)
    return open_environment(config, logs=logs, stop_grace_s=1.0)


async def play(environment: RemoteEnvironment, number: int, seed: int = 0) -> tuple[str, dict[str, object]]:
    """Play an episode of two turns; returns what the environment said last, and the outcome."""
    episode = environment.episode(Example("", {"number": number}), seed)
    try:
        messages = tuple(await episode.reply(()))
        messages += (Message("assistant", "hello"),)
        reply = tuple(await episode.reply(messages))
        assert not await episode.reply((*messages, *reply, Message("assistant", "bye")))
    finally:
        outcome = dict(await episode.close())
    return reply[0].content, outcome


@pytest.mark.slow
async def test_an_environment_in_workers_is_the_same_environment(tmp_path: Path) -> None:
    async with open_remote(tmp_path) as environment:
        assert (environment.name, environment.size("train"), environment.size("held_out")) == (
            "planted",
            8,
            2,
        )
        assert (environment.stop, environment.tools[0]["type"]) == ([">"], "function")
        assert await environment.example("held_out", 1) == Example("held_out 1", {"number": 1})
        said, outcome = await play(environment, 0, seed=7)
        assert said.startswith("pong")
        assert outcome == {"seed": 7}


async def test_the_state_of_an_environment_or_its_error_is_returned_by_the_worker(tmp_path: Path) -> None:
    async with open_remote(tmp_path, n_workers=1) as environment:
        assert state_columns(environment) == {"pings": "list<int64>"}
        kept = []
        for number in (0, 6):
            episode = environment.episode(Example("", {"number": number}), seed=7)
            await episode.reply(())
            assert await episode.close() == {"seed": 7}
            kept.append(read_episode_state(environment, episode))
    assert kept[0] == EpisodeState({"pings": [7, 0]})
    assert "the state is not JSON" in kept[1].error


@pytest.mark.slow
async def test_episodes_are_spread_evenly_over_the_workers(tmp_path: Path) -> None:
    async with open_remote(tmp_path) as environment:
        said = [content for content, _ in await asyncio.gather(*(play(environment, 0) for _ in range(8)))]
        assert sorted(said.count(each) for each in set(said)) == [4, 4]
        assert str(os.getpid()) not in "".join(said)


@pytest.mark.slow
async def test_an_exception_of_an_environment_fails_its_episode_with_its_type(tmp_path: Path) -> None:
    async with open_remote(tmp_path, n_workers=1) as environment:
        with pytest.raises(ForeignError, match="no such ping") as raised:
            await play(environment, 3)
        assert raised.value.kind == "LookupError"
        assert (await play(environment, 0))[1] == {"seed": 0}
        with pytest.raises(ForeignError) as raised:
            await play(environment, 5)
        assert raised.value.kind == "TypeError"


@pytest.mark.slow
async def test_a_missing_reply_fails_its_episode_and_no_other(tmp_path: Path) -> None:
    async with open_remote(tmp_path, n_workers=1, env_timeout_s=TIMEOUT_S) as environment:
        slow = asyncio.ensure_future(play(environment, 4))
        await asyncio.sleep(0.1)
        assert (await play(environment, 0))[1] == {"seed": 0}
        with pytest.raises(EpisodeTimeoutError, match=r"rollout\.env_timeout_s = 2 s"):
            await slow
        assert environment.restarts == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2], ids=["blocking", "crashing"])
async def test_a_worker_that_blocks_or_crashes_is_replaced_and_the_others_continue(
    tmp_path: Path, number: int
) -> None:
    async with open_remote(tmp_path, env_timeout_s=TIMEOUT_S) as environment:
        bad = asyncio.ensure_future(play(environment, number))
        await asyncio.sleep(0)
        for seed in range(5):
            assert (await play(environment, 0, seed))[1] == {"seed": seed}
        with pytest.raises((WorkerDiedError, EpisodeTimeoutError)):
            await bad
        assert len(await workers_that_answer(environment, 2)) == 2
        assert environment.restarts == 1


async def workers_that_answer(environment: RemoteEnvironment, n_workers: int) -> set[str]:
    """Play until that many workers have answered."""
    seen: set[str] = set()
    async with asyncio.timeout(60):
        while len(seen) < n_workers:
            seen = {said for said, _ in await asyncio.gather(*(play(environment, 0) for _ in range(4)))}
    return seen


@pytest.mark.slow
async def test_every_episode_in_a_worker_that_blocks_fails_and_says_why(tmp_path: Path) -> None:
    async with open_remote(tmp_path, n_workers=1, env_timeout_s=TIMEOUT_S) as environment:
        concurrent = environment.episode(Example("", {"number": 0}), seed=0)
        messages = tuple(await concurrent.reply(()))
        bad = asyncio.ensure_future(play(environment, 1))
        async with asyncio.timeout(PATIENCE_S):
            while not (tmp_path / "blocks").exists():  # noqa: ASYNC110 - it is another process's
                await asyncio.sleep(0.02)
        with pytest.raises((WorkerDiedError, EpisodeTimeoutError), match=r"rollout\.env_timeout_s = 2 s"):
            await concurrent.reply((*messages, Message("assistant", "hello")))
        assert await concurrent.close() == {}
        with pytest.raises((WorkerDiedError, EpisodeTimeoutError)):
            await bad
        assert (await play(environment, 0, 7))[1] == {"seed": 7}


async def test_open_episodes_of_a_worker_that_is_killed_say_so(tmp_path: Path) -> None:
    async with open_remote(tmp_path, n_workers=1) as environment:
        said, _ = await play(environment, 0)
        open_one = environment.episode(Example("", {"number": 0}), seed=0)
        messages = tuple(await open_one.reply(()))
        while_generating = environment.episode(Example("", {"number": 0}), seed=1)
        await while_generating.reply(())
        os.kill(int(said.split()[1]), signal.SIGKILL)
        with pytest.raises(WorkerKilledError, match="signal SIGKILL"):
            await open_one.reply((*messages, Message("assistant", "hello")))
        assert (await play(environment, 0, 7))[1] == {"seed": 7}
        # The worker has been replaced meanwhile.
        with pytest.raises(WorkerKilledError, match="signal SIGKILL"):
            await while_generating.reply((*messages, Message("assistant", "hello")))


@pytest.mark.slow
async def test_a_worker_is_replaced_after_its_episodes_and_its_open_ones_are_played_to_their_end(
    tmp_path: Path,
) -> None:
    async with open_remote(tmp_path, n_workers=1, env_worker_max_episodes=4) as environment:
        said = [content for content, _ in await asyncio.gather(*(play(environment, 0) for _ in range(12)))]
        assert [said.count(each) for each in dict.fromkeys(said)] == [4, 4, 4]
        assert environment.restarts == 0


@pytest.mark.slow
async def test_workers_that_die_again_and_again_end_the_run_with_the_reason(tmp_path: Path) -> None:
    async with open_remote(tmp_path, "DiesAtOnce", n_workers=1) as environment:
        for _ in range(MAX_RESTARTS + 1):
            with pytest.raises(WorkerDiedError, match="ended with exit status 4"):
                await play(environment, 0)
        with pytest.raises(ServiceDiedError, match=r"so did 3 before it; none of them finished an episode"):
            await play(environment, 0)


async def test_an_environment_that_cannot_be_made_in_a_worker_says_why(tmp_path: Path) -> None:
    with pytest.raises(ServiceStartError, match=r"rollout\.environment = 'planted:NeverUp'.*no data"):
        async with open_remote(tmp_path, "NeverUp"):
            pass


async def test_an_error_of_the_body_is_raised_unchanged_and_no_worker_survives(tmp_path: Path) -> None:
    async def fail_after_an_episode() -> None:
        nonlocal said
        async with open_remote(tmp_path, n_workers=1) as environment:
            said, _ = await play(environment, 0)
            raise KeyError

    said = ""
    with pytest.raises(KeyError):
        await fail_after_an_episode()
    with pytest.raises(ProcessLookupError):
        os.kill(int(said.split()[1]), 0)


OWNER = """
import asyncio, os, signal, sys
from pathlib import Path
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.remote_environment import open_environment

async def main():
    config = RolloutConfig(environment="planted:Planted", env_workers=2)
    async with open_environment(config, logs=Path(sys.argv[1]), stop_grace_s=0.5):
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.slow
def test_workers_are_gone_when_the_flow_is_killed(tmp_path: Path) -> None:
    marker = f"{tmp_path}"
    environment = os.environ | {"PLANTED_MARKER": marker}
    subprocess.run([sys.executable, "-c", OWNER, str(tmp_path)], env=environment, check=False)
    assert (tmp_path / "environment-1.log").exists()
    deadline = time.monotonic() + 30
    while any(_has_marker(each, marker) for each in psutil.process_iter()):
        assert time.monotonic() < deadline, "they are still there"
        time.sleep(0.05)


def _has_marker(process: psutil.Process, marker: str) -> bool:
    with suppress(psutil.Error):
        return process.environ().get("PLANTED_MARKER") == marker
    return False
