"""Which settings go with actors, and what the flow gets of their rows."""

import sys
from typing import Any

import pytest

from rollmill.flows.checks.preflight import preflight
from rollmill.flows.configuration.settings import load
from rollmill.flows.run.executor.actor_messages import ROLLOUT_COLUMNS, SCORE_COLUMNS
from rollmill.flows.run.executor.group_actor import FollowingPool, Happenings
from rollmill.flows.run.executor.ray_executor import count_slots
from rollmill.tasks.errors import ConfigError, ConnectionLostError, TransientRequestError
from rollmill.tasks.serve.server_pool import ServerChange
from rollmill.tasks.store.schemas import dataset_schema
from tests.stubs.toy_settings import toy_config, validate_toy

RAY = {"kind": "ray"}


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"executor": RAY, "store": {"root": "s3://bucket/runs"}}, "store.root"),
        (
            {
                "executor": RAY,
                "train": {"kl": {"reference": "deployment", "urls": ["http://a:1"], "coef": 0.1}},
            },
            "train.kl.reference",
        ),
        ({"executor": RAY | {"address": "head:6379"}}, "serve.urls"),
        ({"executor": {"address": "head:6379"}}, "executor.address"),
    ],
)
def test_what_actors_cannot_do_is_refused_by_the_setting(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate_toy(values)
    assert refused.value.field == field


def test_a_cluster_with_running_servers_is_accepted() -> None:
    values = {"executor": RAY | {"address": "head:6379"}, "serve": {"urls": ["http://a:1"]}}
    assert validate_toy(values).executor.address == "head:6379"


def test_a_missing_ray_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"executor.kind = 'ray': needs ray: pip install 'rollmill\[ray\]'"):
        preflight(load("quickstart", ("executor.kind=ray",)))


def test_the_flow_gets_no_tokens_and_no_texts_of_a_trajectory() -> None:
    lists = {
        field.name
        for dataset, columns in (("rollouts", ROLLOUT_COLUMNS), ("scores", SCORE_COLUMNS))
        for field in dataset_schema(dataset)
        if field.name in columns and "list" in str(field.type)
    }
    assert lists == {"turn_starts", "turn_tokens", "turn_rewards", "token_rewards"}
    assert not {"token_ids", "logprobs", "messages", "example"} & {*ROLLOUT_COLUMNS, *SCORE_COLUMNS}


def test_two_more_groups_wait_in_each_actor() -> None:
    rollout = {"group_size": 8, "max_in_flight": 64}
    assert count_slots(toy_config({"rollout": rollout})) == 64
    assert count_slots(toy_config({"rollout": rollout, "executor": RAY | {"actors": 3}})) == 64 + 48


async def test_an_actor_reports_servers_that_fail_and_follows_what_the_flow_decides() -> None:
    happenings = Happenings()
    pool = FollowingPool(happenings, toy_config(), "actor")
    for url in ("http://a:1", "http://b:1"):
        await pool.follow(ServerChange("admit", url, "key"))
    async with pool.lease(0, 10) as first:
        assert first.api_key == "key"
    pool.note_failure(first, TransientRequestError("busy"))
    assert (await happenings.take()).alarms == {first.url: False}
    pool.note_failure(first, ConnectionLostError("gone"))
    happenings.finish([7, 7, 8])
    report = await happenings.take()
    assert (report.alarms, report.finished) == ({first.url: True}, {7: 2, 8: 1})
    async with pool.lease(0, 10) as second:
        assert second is not first
    await pool.follow(ServerChange("remove", second.url, "key"))
    await pool.follow(ServerChange("admit", first.url, "key"))
    assert not pool.is_suspect(first)
    async with pool.lease(0, 10) as third:
        assert third is first
    await pool.close()
