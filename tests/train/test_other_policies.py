"""What other policies say of a batch's rows, and annotations, on real ranks against a plain forward pass."""

import shutil
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollmill.tasks.errors import BatchRefusedError, RollmillError, ShardError
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.logprob_rows import make_logprob_rows, scatter_to_trained
from rollmill.tasks.store.reader import read, scan
from rollmill.tasks.store.schemas import make_batch
from rollmill.tasks.store.shards.writer import RunWriter
from rollmill.tasks.store.staged_rows import StagedRows, ingest_rows
from rollmill.tasks.store.stored_batch import read_batch_digest
from rollmill.tasks.train.config import KLConfig, TrainConfig
from rollmill.tasks.train.policy_logprobs import plan_single_rows
from rollmill.tasks.train.samples import Samples, read_samples
from rollmill.tasks.train.service.answers import StepResult
from rollmill.tasks.train.service.commands import ComputeOldLogprobs, DigestState, LoadPolicy, TrainStep
from rollmill.tasks.train.service.trainer_client import TrainerClient

pytestmark = pytest.mark.service


class RunTrainer(Protocol):
    def __call__(self, config: TrainConfig) -> AbstractAsyncContextManager[Any]: ...


class Naive(NamedTuple):
    """[T] of each row, NaN where nothing is trained."""

    logprobs: list[np.ndarray]
    entropies: list[np.ndarray]


@torch.no_grad()
def naive(folder: Path, samples: Samples) -> Naive:
    """Row by row, with the whole head, in double precision."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    logprobs, entropies = [], []
    for row, mask in enumerate(samples.loss_masks):
        ids = torch.tensor(samples.token_ids[row], dtype=torch.int64)
        scaled = model(ids[None]).logits[0, :-1] / float(samples.temperatures[row])
        each = torch.log_softmax(scaled, 1)
        entropy = -(each.exp() * each).sum(1).numpy()
        chosen = each.gather(1, ids[1:, None])[:, 0].numpy()
        logprobs.append(scatter_to_trained(mask, chosen[mask[1:]]))
        entropies.append(scatter_to_trained(mask, entropy[mask[1:]]))
    return Naive(logprobs, entropies)


def by_id(folder: Path, dataset: str, column: str, **partition: Any) -> dict[str, np.ndarray]:
    rows = read(RunFolder(folder), dataset, ["trajectory_id", column], **partition)
    ids, values = rows["trajectory_id"].to_pylist(), rows[column].to_pylist()
    return {name: np.array(each) for name, each in zip(ids, values, strict=True)}


async def store(folder: Path, *staged: StagedRows) -> list[int]:
    """As the flow does; returns how many rows each had that were not stored."""
    run, epoch = RunFolder(folder), 1 + len(open_files(RunFolder(folder)).keys("**/*.arrow"))
    async with RunWriter(open_files(run), epoch, 0.0) as writer:
        return [await ingest_rows(run, open_files(run), writer, each) for each in staged]


@pytest.mark.parametrize(("ranks", "zero_stage"), [(2, 3), pytest.param(1, 0, marks=pytest.mark.long)])
async def test_other_policies_and_annotations_equal_a_plain_forward_pass(
    ranks: int, zero_stage: int, tiny_model: Path, batches: Any, run_trainer: RunTrainer, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    digest = batches.write_step(run, 0, batches.uneven_rows(12))
    samples = read_samples(str(run), 0)[1]
    expected, ids = naive(tiny_model, samples), samples.trajectory_ids
    config = TrainConfig(
        ranks=ranks,
        zero_stage=zero_stage,
        micro_batch_tokens=512,
        kl=KLConfig(reference="frozen"),
        old_logprobs="trainer",
        annotate_every=1,
    )

    async with run_trainer(config) as (client, _):
        await load(client, tiny_model, run)
        with pytest.raises(BatchRefusedError, match="is at step 0 of run r"):
            await score(client, run, 1, ids)
        first, again = [await score(client, run, 0, each) for each in (ids[:5], ids[2:4])]
        assert await score(client, run, 0, ids[-1:]) is None, "its row has no sampled token"
        alone = rows_of(run, again)
        assert all(
            np.array_equal(alone[name], rows_of(run, first)[name], equal_nan=True) for name in ids[2:4]
        )
        assert await store(run, first, again) == [5, 0]

        result = await train(client, run, digest)
        assert await store(run, *result.staged) == [11, 6, 11]
        divergence = [each.value for each in result.metrics if each.name == "train/kl_reference_nats"]
        assert np.abs(divergence).max() < 1e-6, "the reference is the start model"
        trained = await weights(client)
        await load(client, tiny_model, run)
        resumed = await train(client, run, digest)
        assert [each.dataset for each in resumed.staged] == ["annotations"]
        assert await store(run, *resumed.staged) == [0]
        assert await weights(client) == trained

    assert not list((run / ".tmp/staged").iterdir())
    models = scan(RunFolder(run), "logprobs", ["model"]).collect()["model"].value_counts().rows()
    assert sorted(models) == [("r:1:0", 11), (tiny_model.name, 11)]
    for policy in ("reference", "trainer"):
        close(by_id(run, "logprobs", "logprobs", policy=policy, step=0), ids, expected.logprobs)
    annotated = {
        name: by_id(run, "annotations", name, step=0) for name in ("logprobs", "entropy", "ratio", "clipped")
    }
    close(annotated["logprobs"], ids, expected.logprobs)
    close(annotated["entropy"], ids, expected.entropies)
    close(annotated["ratio"], ids, [each * 0 + 1 for each in expected.logprobs])
    assert not any(each.any() for each in annotated["clipped"].values())
    joined = scan(RunFolder(run), "rollouts").join(
        scan(RunFolder(run), "annotations"), on="trajectory_id", suffix="_"
    )
    lengths = joined.select(pl.col("token_ids").list.len() == pl.col("clipped").list.len()).collect()
    assert lengths["token_ids"].all()


async def test_stored_log_probabilities_of_a_teacher_train_as_those_of_a_deployment_do(
    tiny_model: Path, batches: Any, run_trainer: RunTrainer, tmp_path: Path
) -> None:
    own, source, retrained = (tmp_path / name for name in ("own", "source", "retrained"))
    rows = [each._replace(temperature=1.0) for each in batches.uneven_rows(8)]
    digest = batches.write_step(own, 0, rows)
    batches.write_step(source, 0, rows)
    samples = read_samples(str(own), 0)[1]
    ids = samples.trajectory_ids
    values = [
        np.where(mask, -0.5 - 0.1 * row, np.nan).astype(np.float32)
        for row, mask in enumerate(samples.loss_masks)
    ]
    made = make_logprob_rows("r", 0, ["teacher@1"] * len(ids), ids, values)
    await append(own, "logprobs", made, policy="reference", step=0)
    await append(source, "logprobs", made, policy="teacher", step=0)
    batch = read(RunFolder(own), "batches", step=0).to_pylist()
    drawn = make_batch(
        "batches",
        {name: [row[name] for row in batch] for name in batch[0]} | {"source": [str(source)] * len(batch)},
    )
    await append(retrained, "batches", drawn, step=0)

    kl = {"coef": 1.0, "estimator": "k1", "apply_to": "advantage"}
    of_deployment = TrainConfig(kl=KLConfig(reference="deployment", urls=("http://h:1",), **kl))
    of_teacher = TrainConfig(kl=KLConfig(reference="stored", teacher="teacher", **kl))
    async with run_trainer(of_deployment) as (client, _):
        await load(client, tiny_model, own)
        await train(client, own, digest)
        expected = await weights(client)
    async with run_trainer(of_teacher) as (client, _):
        await load(client, tiny_model, retrained)
        result = await train(client, retrained, read_batch_digest(RunFolder(retrained), 0))
        assert await weights(client) == expected
        assert result.staged == (), "the source has the rows"
        await load(client, tiny_model, source)
        with pytest.raises(
            BatchRefusedError, match=r"of the teacher \(train.kl.teacher\) in logprobs/policy=teacher"
        ):
            await train(client, await without_teacher(source), digest)


async def without_teacher(source: Path) -> Path:
    """The run, whose teacher's rows were moved out of it."""
    (source / "logprobs").rename(source.with_name("logprobs"))
    return source


async def test_a_trainer_whose_first_rank_cannot_read_or_stage_rows_does_not_hang(
    tiny_model: Path, batches: Any, run_trainer: RunTrainer, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    digest = batches.write_step(run, 0, batches.uneven_rows(12))
    ids = read_samples(str(run), 0)[1].trajectory_ids
    config = TrainConfig(ranks=2, micro_batch_tokens=512, old_logprobs="trainer", annotate_every=1)
    async with run_trainer(config) as (client, process):
        await load(client, tiny_model, run)
        with pytest.raises(ShardError, match="absent"):
            await score(client, run, 0, ["absent"])
        assert await score(client, run, 0, ids[:2]) is not None, "the ranks are in step"
        shutil.rmtree(run / ".tmp")
        (run / ".tmp").write_text("a file where a folder should be")
        with pytest.raises(RollmillError):
            await train(client, run, digest)
        await process.wait()
    assert "cannot stage rows of its step" in process.log_tail()


async def append(folder: Path, dataset: str, rows: pa.RecordBatch, **partition: Any) -> None:
    files = open_files(RunFolder(folder))
    async with RunWriter(files, 1 + len(files.keys("**/*.arrow")), 0.0) as writer:
        await writer.append(dataset, rows, **partition)


def test_rows_one_by_one_are_as_many_on_every_rank() -> None:
    assert plan_single_rows([0, 1, 2], [5, 9, 7], 2) == [[[1], [0]], [[2], []]]
    assert plan_single_rows([], [], 2) == [[], []]


async def load(client: TrainerClient, model: Path, run: Path) -> None:
    await client.do(
        LoadPolicy(run_id="r", incarnation=1, model=str(model), folder=str(run), checkpoint=None, version=0)
    )


async def train(client: TrainerClient, run: Path, digest: str) -> StepResult:
    return await client.do(TrainStep(folder=str(run), run_id="r", step=0, digest=digest))


async def score(client: TrainerClient, run: Path, step: int, ids: list[str]) -> StagedRows | None:
    return await client.do(ComputeOldLogprobs(folder=str(run), run_id="r", step=step, trajectory_ids=ids))


async def weights(client: TrainerClient) -> dict[str, str]:
    return {
        name: each for name, each in (await client.do(DigestState())).items() if name.startswith("weights/")
    }


def rows_of(run: Path, staged: StagedRows | None) -> dict[str, np.ndarray]:
    assert staged is not None
    rows = pl.read_ipc((run / staged.key).read_bytes())
    return {name: np.array(each) for name, each in rows.select("trajectory_id", "logprobs").iter_rows()}


def close(found: dict[str, np.ndarray], ids: list[str], expected: list[np.ndarray]) -> None:
    trained = {name: each for name, each in zip(ids, expected, strict=True) if np.isfinite(each).any()}
    assert found.keys() == trained.keys()
    for name, each in trained.items():
        np.testing.assert_allclose(found[name], each, atol=1e-5)
