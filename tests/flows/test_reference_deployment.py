"""Requests to reference servers and their stored answers; the servers follow a plan."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rollmill.flows.run.rollout_logprobs import ReferenceDeployment
from rollmill.tasks.errors import ConfigError, RequestError
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.rows import rows_from_table
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.schemas import dataset_schema, make_batch

IDS = ["a", "b", "c"]


class Server:
    """Says -1, -2, ... of a prompt's tokens; not of one whose first token it does not know."""

    def __init__(self, unknown: int = -1) -> None:
        self.unknown, self.asked = unknown, list[int]()

    async def prompt_logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        self.asked.append(int(token_ids[0]))
        if token_ids[0] == self.unknown:
            raise RequestError("status 400: no")
        return -np.arange(1, len(token_ids), dtype=np.float32)

    async def model(self) -> str:
        return "frozen"


def make_rows(dataset: str, **columns: object) -> pa.RecordBatch:
    """Three rows of a data set, plain but for the columns given."""
    plain: dict[str, object] = {}
    for field in dataset_schema(dataset):
        value: object = [] if pa.types.is_large_list(field.type) else pa.scalar(0).cast(field.type).as_py()
        plain[field.name] = [value] * len(IDS)
    return make_batch(dataset, plain | columns)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[OpenRun]:
    """A run with a step's rollouts, of three tokens each, the last two sampled, and their batch."""
    config = StoreConfig(root=str(tmp_path))
    given = {"config": {}, "fixed": {}, "versions": {}, "git_commit": "", "config_of": config}
    with OpenRun.open(RunFolder(tmp_path / "run"), **given) as run:
        async with run.writer:
            tokens = [[number, 8, 9] for number in range(len(IDS))]
            masks = [[False, True, True]] * len(IDS)
            common = {"step": [2] * len(IDS), "trajectory_id": IDS}
            rollouts = make_rows(
                "rollouts", **common, token_ids=tokens, loss_mask=masks, temperature=[1.0] * 3
            )
            await run.writer.append("rollouts", rollouts, step=2)
            await run.writer.append(
                "batches", make_rows("batches", **common, source=[""] * 3, source_step=[2] * 3), step=2
            )
            yield run


def rollouts(store: OpenRun) -> pa.RecordBatch:
    return rows_from_table(read(store.folder, "rollouts", step=2))


def read_stored(store: OpenRun) -> dict[str, list[float]]:
    rows = read(store.folder, "logprobs", policy="reference", step=2).to_pylist()
    assert all(row["model"] == "frozen" for row in rows)
    return {row["trajectory_id"]: row["logprobs"][1:] for row in rows}


Deployment = Callable[..., ReferenceDeployment]


@pytest.fixture
def deployment(store: OpenRun) -> Deployment:
    return lambda *servers: ReferenceDeployment(store, servers, 2, print)


async def test_stored_log_probabilities_are_not_requested_again(
    store: OpenRun, deployment: Deployment
) -> None:
    server = Server()
    await deployment(server).ask(2, rollouts(store).slice(0, 2))
    await deployment(server).complete(2)
    await deployment(server).complete(2)
    assert sorted(server.asked) == [0, 1, 2]
    assert read_stored(store) == {name: [-1.0, -2.0] for name in IDS}


async def test_another_server_is_asked_when_one_does_not_answer(
    store: OpenRun, deployment: Deployment
) -> None:
    first, second = Server(unknown=1), Server()
    await deployment(first, second).ask(2, rollouts(store))
    assert sorted(read_stored(store)) == IDS
    assert 1 in second.asked


async def test_sampling_continues_without_an_answer_and_training_does_not(
    store: OpenRun, deployment: Deployment
) -> None:
    failing = deployment(Server(unknown=1))
    await failing.ask(2, rollouts(store))
    assert sorted(read_stored(store)) == ["a", "c"]
    with pytest.raises(RequestError, match="no reference server answers for trajectory b: status 400: no"):
        await failing.complete(2)
    await deployment(Server()).complete(2)
    assert sorted(read_stored(store)) == IDS


async def test_a_trajectory_of_another_temperature_is_refused(store: OpenRun, deployment: Deployment) -> None:
    warmer = rollouts(store).set_column(
        rollouts(store).schema.get_field_index("temperature"),
        "temperature",
        pa.array([1.0, 0.5, 1.0], pa.float32()),
    )
    with pytest.raises(ConfigError, match=r"trajectory b was sampled at temperature 0\.5"):
        await deployment(Server()).ask(2, warmer)
