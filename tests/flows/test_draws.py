"""What a step of a retrained run trains on."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.offline.draws import GroupPool, store_draw
from rollmill.flows.offline.retrain_sources import check_tokenizers, find_source_steps
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.run.fork_copy import fork_run
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.schemas import dataset_schema
from tests.stubs.toy_settings import validate_toy

SCORES = "short@1"


def make_rows(dataset: str, rows: Sequence[dict[str, object]]) -> pa.RecordBatch:
    """Rows of a data set; 0, "" or [] in every column that is not given."""
    plain = {
        field.name: [] if pa.types.is_large_list(field.type) else pa.scalar(0).cast(field.type).as_py()
        for field in dataset_schema(dataset)
    }
    return pa.RecordBatch.from_pylist([plain | row for row in rows], schema=dataset_schema(dataset))


def open_run(folder: Path, config: dict[str, Any] | None = None) -> OpenRun:
    return OpenRun.open(
        RunFolder(folder),
        config=config or {},
        fixed={},
        versions={},
        git_commit="",
        config_of=StoreConfig(),
    )


async def add_step(run: OpenRun, step: int) -> None:
    """Two groups of two, rewards 0 and 1 each."""
    ids = [
        {
            "step": step,
            "group": step * 2 + group,
            "sample": sample,
            "trajectory_id": f"{step}.{group}.{sample}",
        }
        for group in range(2)
        for sample in range(2)
    ]
    common = {"status": "complete", "env": "addition", "n_completion_tokens": 3}
    scores = [each | {"status": "scored", "reward": each["sample"]} for each in ids]
    groups = [{"step": step, "group": step * 2 + group, "expected": 2} for group in range(2)]
    await run.writer.append("rollouts", make_rows("rollouts", [each | common for each in ids]), step=step)
    await run.writer.append("scores", make_rows("scores", scores), scorer=SCORES, step=step)
    await run.writer.append("groups", make_rows("groups", groups), step=step)
    await run.writer.append("batches", make_rows("batches", []), step=step)


@pytest.fixture
async def source(tmp_path: Path) -> RunFolder:
    """A run that has trained on two steps."""
    folder = tmp_path / "source"
    with open_run(folder, {"model": str(tmp_path / "theirs")}) as run:
        async with run.writer:
            for step in range(2):
                await add_step(run, step)
    return RunFolder(folder)


def config_of(*sources: RunFolder, groups: int = 1, **retrain: object) -> RunConfig:
    chosen = {"sources": [each.absolute for each in sources], "scores": SCORES}
    return validate_toy({"rollout": {"groups_per_step": groups}, "retrain": chosen | retrain})


async def test_a_group_that_several_sources_have_in_common_counts_once(
    source: RunFolder, tmp_path: Path
) -> None:
    forked = RunFolder(tmp_path / "fork")
    fork_run(source, 1, forked, {}, StoreConfig(), {})

    assert len(GroupPool.read(config_of(source)).groups) == 4
    assert len(GroupPool.read(config_of(source, source)).groups) == 4
    assert len(GroupPool.read(config_of(source, forked)).groups) == 4


async def test_groups_and_batch_of_an_open_step_are_of_one_draw(source: RunFolder, tmp_path: Path) -> None:
    config = config_of(source, groups=2)
    other = make_rows("groups", [{"group": group, "expected": 7} for group in (0, 1, 5)])
    with open_run(tmp_path / "new") as store:
        async with store.writer:
            await store.writer.append("groups", other, step=0)
            draw = await store_draw(store, config, GroupPool.read(config), 0)

    groups, batch = (read(store.folder, name, step=0) for name in ("groups", "batches"))
    assert sorted(groups["group"].to_pylist()) == sorted(set(batch["group"].to_pylist())) == [0, 1]
    assert set(groups["expected"].to_pylist()) == {2}
    assert draw.reward == 0.5


async def test_scores_and_steps_that_no_source_has_are_refused_with_what_there_is(source: RunFolder) -> None:
    for wrong in ("nope@1", ""):
        with pytest.raises(ConfigError, match=r"give scores that .* has: short@1"):
            find_source_steps(config_of(source, scores=wrong))
    with pytest.raises(ConfigError, match=r"retrain.where = 'step > 8': no group .* has done steps 0 to 1"):
        find_source_steps(config_of(source, where="step > 8"))


@pytest.mark.parametrize(
    ("condition", "groups"),
    [
        ("step < 1", [(0, 0), (0, 1)]),
        ('"group" in (1, 2)', [(0, 1), (1, 2)]),
        (
            "env <> 'random()' and step /* not random() */ = 1 and (select count(error) from rollouts) > 0",
            [(1, 2), (1, 3)],
        ),
        (
            "reward = 0.5 and reward_std > 0 and n_scored = n and step = 1 -- and nothing else",
            [(1, 2), (1, 3)],
        ),
    ],
)
async def test_groups_that_meet_a_condition_alone_are_drawn(
    source: RunFolder, condition: str, groups: list[tuple[int, int]]
) -> None:
    pool = GroupPool.read(config_of(source, where=condition))
    assert [(each.step, each.group) for each in pool.groups] == groups
    assert pool.find_imported() == set(), "its sampler is known"


@pytest.mark.parametrize(
    ("order_by", "groups"),
    [
        ('step desc, "group"', [(1, 2), (1, 3), (0, 0), (0, 1)]),
        ('"group" % 2 desc', [(0, 1), (1, 3), (0, 0), (1, 2)]),
    ],
)
async def test_each_pass_draws_groups_in_the_given_order(
    source: RunFolder, order_by: str, groups: list[tuple[int, int]]
) -> None:
    config = config_of(source, order_by=order_by, groups=1)
    pool = GroupPool.read(config)
    drawn = [stored for step in range(8) for stored, _ in pool.draw(config, step)]
    assert [(each.step, each.group) for each in drawn] == groups * 2


async def test_a_group_of_weight_0_is_never_drawn_and_counted(source: RunFolder) -> None:
    config = config_of(source, weight='"group" % 2', groups=1)
    pool = GroupPool.read(config)
    assert pool.left_out["weight 0"] == 2
    drawn = {stored.group for step in range(40) for stored, _ in pool.draw(config, step)}
    assert drawn == {1, 3}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"order_by": "rewards"}, r'retrain.order_by = .*"rewards" not found'),
        (
            {"order_by": "random()"},
            r"retrain.order_by = .*random would give other values.*, such as hash\(step, \"group\"\)$",
        ),
        ({"weight": "1 - step"}, None),
        ({"weight": "1) as a, (2"}, r"retrain.weight = .*give one number"),
        ({"weight": "-1"}, r"retrain.weight = .*it is -1.0 for group 0 of step 0"),
        ({"weight": "null"}, r"retrain.weight = .*it is None for group"),
        ({"weight": "1 / (step - step)"}, r"retrain.weight = .*it is (inf|None|nan)"),
        ({"weight": "'many'"}, r"retrain.weight = .*Could not convert string"),
        ({"weight": "0"}, r"retrain.sources = .*can be trained on \(4 weight 0\)"),
        ({"weight": "1", "order_by": "step"}, "give either an order or retrain.weight"),
    ],
)
async def test_a_wrong_order_or_weight_is_refused_by_name(
    source: RunFolder, settings: dict[str, str], reason: str | None
) -> None:
    with pytest.raises(ConfigError, match=reason) if reason else nullcontext():
        GroupPool.read(config_of(source, **settings))


async def test_a_group_without_a_score_that_meets_a_condition_is_left_out(source: RunFolder) -> None:
    rollout = {"trajectory_id": "1.9.0", "step": 1, "group": 9, "status": "complete", "env": "addition"}
    with open_run(source.local) as run:
        async with run.writer:
            await run.writer.append("rollouts", make_rows("rollouts", [rollout]), step=1)
            await run.writer.append(
                "groups", make_rows("groups", [{"step": 1, "group": 9, "expected": 2}]), step=1
            )
    for condition in ("", "step = 1"):
        pool = GroupPool.read(config_of(source, where=condition))
        assert [each.group for each in pool.groups if each.step == 1] == [2, 3]


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        ("rewards > 1", 'Referenced column "rewards" not found'),
        ("reward >", "syntax error"),
        ("env in (select * from read_text('/etc/hostname'))", "disabled"),
        ("reward > 0 and Random () < 0.5", "Random would give other values each time the run is resumed"),
        ('reward > 0 and "random"() < 0.5', "random would give other values"),
        ("random /* of 1 */ () < 0.5", "random would give other values"),
        ("current_date < '2030-01-01'", "current_date would give other values"),
        ("localtimestamp < '2030-01-01'", "localtimestamp would give other values"),
        ("'Now'::timestamp < '2030-01-01'", "'Now' would give other values"),
        ("date 'today' < '2030-01-01'", "'today' would give other values"),
    ],
)
async def test_what_is_no_condition_on_groups_is_refused(
    source: RunFolder, condition: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        GroupPool.read(config_of(source, where=condition))
    assert str(refused.value).startswith("retrain.where = ")


async def test_a_source_with_another_vocabulary_is_refused(
    source: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where there is no start model
    for name, vocabulary in (("ours", {"a": 0}), ("theirs", {"b": 0})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    config = config_of(source)
    sources = config.retrain.sources
    check_tokenizers(config, sources)

    with pytest.raises(ConfigError, match="vocabulary differs from that of the start model"):
        check_tokenizers(config.model_copy(update={"model": str(tmp_path / "ours")}), sources)
    check_tokenizers(config.model_copy(update={"model": str(tmp_path / "theirs")}), sources)
