"""A teacher that does not fit a run is refused before anything is started, and what is stored is not asked for again."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from teacher_folders import make_teacher

from rollmill.flows.configuration.config import AnnotateConfig
from rollmill.flows.offline.draws import GroupPool
from rollmill.flows.offline.teacher import (
    check_annotation,
    describe_teacher,
    identify_teacher,
    is_annotated,
    list_unannotated,
    teacher_name,
)
from rollmill.flows.policies.teacher_servers import check_served_tokenizer, open_teacher_servers
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.schemas import dataset_schema
from tests.stubs.toy_settings import validate_toy
from tests.stubs.vllm_server import StubVllmServer

SCORES = "short@1"
IDS = ["0.0", "0.1", "1.0", "1.1"]


def make_rows(dataset: str, rows: Sequence[dict[str, object]]) -> pa.RecordBatch:
    """Rows of a data set; 0, "" or [] in every column that is not given."""
    plain = {
        field.name: [] if pa.types.is_large_list(field.type) else pa.scalar(0).cast(field.type).as_py()
        for field in dataset_schema(dataset)
    }
    return pa.RecordBatch.from_pylist([plain | row for row in rows], schema=dataset_schema(dataset))


def open_run(folder: Path, config: dict[str, Any]) -> OpenRun:
    return OpenRun.open(
        RunFolder(folder), config=config, fixed={}, versions={}, git_commit="", config_of=StoreConfig()
    )


async def write_run(folder: Path, model: Path, temperature: float = 1.0, name: str = "run") -> RunFolder:
    """A run of one step: two groups of two, in one of which the rewards are equal; one further trajectory failed."""
    rows = [
        {"trajectory_id": each, "group": int(each[0]), "sample": int(each[2]), "temperature": temperature}
        for each in IDS
    ]
    common = {"status": "complete", "env": "addition", "n_completion_tokens": 3}
    failed = rows[0] | {"trajectory_id": "1.2", "group": 1, "sample": 2, "status": "failed"}
    scores = [
        {name: each[name] for name in ("trajectory_id", "group", "sample")}
        | {"status": "scored", "reward": float(each["trajectory_id"] == "0.1")}
        for each in rows
    ]
    with open_run(folder / name, {"model": str(model)}) as run:
        async with run.writer as writer:
            await writer.append(
                "rollouts", make_rows("rollouts", [*(each | common for each in rows), failed]), step=0
            )
            await writer.append("scores", make_rows("scores", scores), scorer=SCORES, step=0)
            groups = [{"group": group, "expected": 2} for group in range(2)]
            await writer.append("groups", make_rows("groups", groups), step=0)
            await writer.append("batches", make_rows("batches", []), step=0)
    return RunFolder(folder / name)


async def annotate(run: RunFolder, ids: Sequence[str], name: str, model: str) -> None:
    """Store rows as a teacher's."""
    with OpenRun.extend(run, config_of=StoreConfig()) as store:
        async with store.writer as writer:
            rows = make_rows("logprobs", [{"trajectory_id": each, "model": model} for each in ids])
            await writer.append("logprobs", rows, policy=name, step=0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_teacher(tmp_path / "policy", b"the policy")


@pytest.fixture
async def run(tmp_path: Path, model: Path) -> RunFolder:
    return await write_run(tmp_path, model)


def settings(teacher: Path | str, **others: Any) -> AnnotateConfig:
    return AnnotateConfig.model_validate({"teacher": str(teacher)} | others)


async def test_what_is_stored_of_one_teacher_is_not_missing_and_is_of_another(
    run: RunFolder, tmp_path: Path
) -> None:
    first = settings(make_teacher(tmp_path / "first"))
    await annotate(run, IDS[:3], "first", describe_teacher(first))

    (step,) = list_unannotated(run, first)
    (other,) = list_unannotated(run, settings(tmp_path / "first", name="second"))
    assert (step.ids, step.n_trajectories) == (("1.1",), 4)
    assert other.ids == tuple(IDS), "a failed trajectory is never trained on"
    assert not is_annotated(run, first)
    await annotate(run, ["1.1"], "first", describe_teacher(first))
    assert is_annotated(run, first)


async def test_a_condition_chooses_groups(run: RunFolder, tmp_path: Path) -> None:
    (step,) = list_unannotated(run, settings(tmp_path / "first", where='"group" = 1'))
    assert step.ids == ("1.0", "1.1")
    teacher = make_teacher(tmp_path / "first")
    with pytest.raises(ConfigError, match=r"where = 'step > 3': no group of .* meets it"):
        check_annotation(run, settings(teacher, where="step > 3"))
    with pytest.raises(ConfigError, match=r"no step is from first_step = 4 .* has rollouts of steps 0 to 0"):
        check_annotation(run, settings(teacher, first_step=4))


async def test_a_teacher_is_its_weights_and_not_its_folder(run: RunFolder, tmp_path: Path) -> None:
    first, moved = (settings(make_teacher(tmp_path / each), name="big") for each in ("first", "moved"))
    other = settings(make_teacher(tmp_path / "other", b"other weights"), name="big")
    await annotate(run, IDS[:1], "big", identify_teacher(run, first))

    identify_teacher(run, moved)
    with pytest.raises(
        ConfigError, match=r"name = 'big': .* by first@\w+, and this teacher is other@\w+: give another name"
    ):
        identify_teacher(run, other)


@pytest.mark.parametrize(
    ("teacher", "name", "message"),
    [
        ("", "", "teacher = '': give the teacher's model folder"),
        (
            "models/big",
            "trainer",
            "name = 'trainer': reference and trainer are log-probabilities that training stores",
        ),
        ("models/reference", "", "name = 'reference': reference and trainer are"),
        ("models/big", "a/b", "name = 'a/b': use letters, digits"),
        ("models/big", "..", r"name = '\.\.': use letters, digits"),
    ],
)
def test_a_name_that_no_teacher_can_have_is_refused(teacher: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        teacher_name(settings(teacher, name=name))


def test_a_teacher_is_named_by_the_last_part_of_its_folder_or_hub_name() -> None:
    assert teacher_name(settings("models/big-8b/")) == teacher_name(settings("someone/big-8b")) == "big-8b"


def change_vocabulary(folder: Path) -> None:
    path = folder / "tokenizer.json"
    stored = json.loads(path.read_text())
    stored["model"]["vocab"] |= {"ü": len(stored["model"]["vocab"])}
    path.write_text(json.dumps(stored))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            change_vocabulary,
            r"its vocabulary differs from that of .*policy, .* a teacher needs the same tokenizer",
        ),
        (
            lambda folder: (folder / "tokenizer.json").unlink(),
            r"cannot be compared with the run's: there is no .*teacher",
        ),
        (lambda folder: (folder / "config.json").unlink(), r"teacher = .*config.json is missing"),
        (
            lambda folder: make_teacher(folder, max_position_embeddings=100),
            r"it has 100 positions, and .* serve.max_model_len = 4096 tokens: if .* set serve.max_model_len=100",
        ),
    ],
)
async def test_a_teacher_that_does_not_fit_the_run_is_refused(
    run: RunFolder, tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    teacher = make_teacher(tmp_path / "teacher")
    check_annotation(run, settings(teacher))
    change(teacher)
    with pytest.raises(ConfigError, match=message):
        check_annotation(run, settings(teacher))


async def test_rollouts_of_another_temperature_are_refused(tmp_path: Path, model: Path) -> None:
    warm = await write_run(tmp_path, model, temperature=0.5, name="warm")
    with pytest.raises(
        ConfigError, match=r"rollout.temperature = 0.5: trajectory 0.0 of step 0 .* at temperature 1 alone"
    ):
        list_unannotated(warm, settings(tmp_path / "teacher"))


@contextmanager
def serve_teacher(folder: Path) -> Iterator[AnnotateConfig]:
    """A stub server of a teacher; yields the settings that attach to it."""
    port = free_port()
    control = StubVllmServer(folder, 0.0).serve(port)
    try:
        yield settings(folder.name, serve={"urls": [f"http://127.0.0.1:{port}"]})
    finally:
        control.stop()


async def test_a_running_server_with_another_model_is_refused(tmp_path: Path) -> None:
    with serve_teacher(make_teacher(tmp_path / "first")) as config:
        async with open_teacher_servers(config, tmp_path) as servers:
            assert len(servers) == 1
        other = config.model_copy(update={"teacher": "second"})
        with pytest.raises(
            ConfigError, match="it serves the model first, and the teacher is second: correct the address"
        ):
            async with open_teacher_servers(other, tmp_path):
                pass


async def test_a_running_server_that_reads_tokens_as_another_text_is_refused(tmp_path: Path) -> None:
    teacher = make_teacher(tmp_path / "first")
    ours, tokens = ChatTokenizer.load_texts(teacher), np.array([2, 3, 4], np.int32)
    exchange_tokens(teacher)
    with serve_teacher(teacher) as config:
        async with open_teacher_servers(config, tmp_path) as (server,):
            await check_served_tokenizer(ours, server, np.array([5, 6], np.int32))
            with pytest.raises(
                ConfigError, match=r"it reads stored tokens as '.+', not as '.+'; a teacher needs the same"
            ):
                await check_served_tokenizer(ours, server, tokens)


def exchange_tokens(folder: Path) -> None:
    """Give the tokens 2 and 3 of a tokenizer each other's texts."""
    path = folder / "tokenizer.json"
    stored = json.loads(path.read_text())
    vocabulary = stored["model"]["vocab"]
    first, second = (next(text for text, number in vocabulary.items() if number == n) for n in (2, 3))
    vocabulary[first], vocabulary[second] = 3, 2
    path.write_text(json.dumps(stored))


def distilled(*sources: RunFolder, **score: object) -> Any:
    """Settings of a retraining from the teacher `big`."""
    return validate_toy(
        {
            "rollout": {"groups_per_step": 1},
            "score": {"advantage": "zero"} | score,
            "train": {"kl": {"reference": "stored", "teacher": "big", "coef": 1.0}},
            "retrain": {"sources": [each.absolute for each in sources], "scores": SCORES},
        }
    )


async def test_a_retraining_without_all_log_probabilities_of_its_teacher_is_refused_with_the_remedy(
    run: RunFolder,
) -> None:
    await annotate(run, IDS, "small", "small@1")
    await annotate(run, IDS[:3], "big", "big@1")
    remedy = r"1 of 4 trajectories of .*run have no .* such as 1.1: `rollmill annotate .*run --teacher MODEL --name big` stores them; it has those of big, small"
    with pytest.raises(ConfigError, match=rf"train.kl.teacher = 'big': {remedy}"):
        GroupPool.read(distilled(run))
    await annotate(run, IDS[3:], "big", "big@1")
    assert len(GroupPool.read(distilled(run)).groups) == 2


async def test_groups_that_are_not_trained_on_need_no_teacher(run: RunFolder) -> None:
    await annotate(run, IDS[:2], "big", "big@1")
    pool = GroupPool.read(distilled(run, advantage="mean"))
    assert [each.group for each in pool.groups] == [0]
    with pytest.raises(ConfigError, match=r"2 of 4 trajectories"):
        GroupPool.read(distilled(run, advantage="mean", train_without_spread=True))


async def test_sources_with_different_models_of_one_name_are_refused(
    run: RunFolder, tmp_path: Path, model: Path
) -> None:
    other = await write_run(tmp_path, model, name="other")
    await annotate(run, IDS, "big", "big@1")
    await annotate(other, IDS, "big", "big@2")
    with pytest.raises(
        ConfigError, match=r"log-probabilities of this name by different models: big@1, big@2"
    ):
        GroupPool.read(distilled(run, other))
