"""A teacher's log-probabilities of stored rollouts, over the command: Prefect is real, the servers are stubs."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from teacher_folders import make_teacher

from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_policies, read
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.schemas import dataset_schema, make_batch
from rollmill.tasks.store.segments import LINEAR, SEGMENT_COLUMNS
from tests.stubs.trainer import LOGPROB
from tests.stubs.vllm_server import StubVllmServer

pytestmark = pytest.mark.service

N = 96
PROMPT = [2, 3, 4]


def name_all() -> list[str]:
    return [f"r.{number}" for number in range(N)]


def name_scored(token_ids: Sequence[int]) -> str:
    """The id of the trajectory that a request for log-probabilities is about: its first two sampled tokens are its number."""
    ones, tens = (each - 5 for each in token_ids[len(PROMPT) : len(PROMPT) + 2])
    return f"r.{10 * tens + ones}"


async def write_source(folder: Path, model: Path) -> RunFolder:
    """A collected run of one step, of N trajectories with three sampled tokens."""
    columns: dict[str, object] = {
        field.name: [[] if pa.types.is_large_list(field.type) else pa.scalar(0).cast(field.type).as_py()] * N
        for field in dataset_schema("rollouts")
    }
    columns |= {
        "trajectory_id": name_all(),
        "sample": list(range(N)),
        "temperature": [1.0] * N,
        "status": ["complete"] * N,
        "n_prompt_tokens": [len(PROMPT)] * N,
        "n_completion_tokens": [3] * N,
        "token_ids": [[*PROMPT, 5 + number % 10, 5 + number // 10, 1] for number in range(N)],
        "loss_mask": [[False] * 3 + [True] * 3] * N,
        "logprobs": [[float("nan")] * 3 + [-1.0] * 3] * N,
        "version_span_starts": [[3]] * N,
        "version_span_versions": [[0]] * N,
        **{name: [[value]] * N for name, value in zip(SEGMENT_COLUMNS, LINEAR[0], strict=True)},
    }
    given = {"config": {"model": str(model)}, "fixed": {}, "versions": {}, "git_commit": "", "trains": False}
    with OpenRun.open(RunFolder(folder), config_of=StoreConfig(), **given) as run:
        columns["run"] = [run.manifest.run] * N
        async with run.writer:
            await run.writer.append("rollouts", make_batch("rollouts", columns), step=0)
    return RunFolder(folder)


@pytest.fixture
def source(workplace: Any) -> RunFolder:
    folder = Path(workplace.folder)
    return asyncio.run(write_source(folder / "runs" / "source", make_teacher(folder / "policy")))


@contextmanager
def serve_teacher(folder: Path) -> Iterator[tuple[StubVllmServer, str]]:
    server, port = StubVllmServer(folder, 0.0), free_port()
    control = server.serve(port)
    try:
        yield server, f"serve.urls=[http://127.0.0.1:{port}]"
    finally:
        control.stop()


def read_ids(source: RunFolder, name: str) -> list[str]:
    ids: list[str] = read(source, "logprobs", ["trajectory_id"], policy=name)["trajectory_id"].to_pylist()
    return ids


def test_a_killed_annotation_asks_for_no_stored_trajectory_again_and_a_second_teacher_has_its_own_rows(
    workplace: Any, source: RunFolder, stub_python: str
) -> None:
    with serve_teacher(make_teacher(Path(workplace.folder) / "big")) as (server, urls):
        words = ("annotate", "source", "--teacher", "big", "--set", urls)
        # Of three bundles of 32 one or more can be stored.
        server.most_scored = N - 10
        running = workplace.start(*words)
        deadline = time.monotonic() + 120.0
        while not (stored := read_ids(source, "big")):
            assert running.poll() is None, running.communicate()[0]
            assert time.monotonic() < deadline, "nothing was stored in time"
            time.sleep(0.02)
        os.kill(running.pid, signal.SIGKILL)
        running.communicate(timeout=120)
        before, server.most_scored = read_ids(source, "big"), None
        assert 0 < len(stored) <= len(before) < N
        server.scored.clear()

        resumed = workplace.run(*words)
        assert resumed.returncode == 0, resumed.stdout
        # The server may read further requests of the killed process meanwhile: of answers that were not stored.
        assert {name_scored(each) for each in server.scored} == set(name_all()) - set(before)
        n_scored = len(server.scored)
        again = workplace.run(*words)
        assert f"logprobs/policy=big has all {N} trajectories, by big" in again.stdout
        assert len(server.scored) == n_scored
    make_teacher(Path(workplace.folder) / "second", b"other weights")
    # Launched, as vLLM is.
    launched = workplace.run(
        "annotate", "source", "--teacher", "second", "--set", f"serve.python={stub_python}"
    )
    complete = workplace.run("annotate", "source", "--teacher", "second", "--set", "serve.python=nowhere")
    verified = workplace.run("verify", "source")

    assert complete.returncode == 0, complete.stdout
    assert launched.returncode == 0, launched.stdout
    assert verified.returncode == 0, verified.stdout
    assert list_policies(source) == ["big", "second"]
    assert len(read_ids(source, "second")) == N
    rows = read(source, "logprobs", policy="big", step=0)
    assert sorted(rows["trajectory_id"].to_pylist()) == sorted(name_all())
    assert {tuple(each[3:]) for each in rows["logprobs"].to_pylist()} == {(LOGPROB,) * 3}
