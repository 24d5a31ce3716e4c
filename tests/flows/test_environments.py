"""Several environments in one run: their settings, shares, rows, metrics and evaluations."""

import asyncio
import json
import logging
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from planned_run import GROUP_SIZE, PlannedSampler, PlannedScoring, open_planned_run, read_stored
from prefect.logging import disable_run_logger
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import validate as validate_form

from rollmill.flows.configuration.environments import environment_configs, group_shares, list_altered
from rollmill.flows.configuration.forms import FORMS
from rollmill.flows.configuration.recipe import start_model_folder, stored_model_folder
from rollmill.flows.configuration.rules import check_sampling
from rollmill.flows.configuration.settings import apply_overrides, load, validate
from rollmill.flows.post_train import post_train
from rollmill.flows.run.live_run import Run
from rollmill.flows.run.run_sinks import evaluation_points
from rollmill.flows.step.held_out import evaluate_prompts, is_evaluated, plan_held_out
from rollmill.flows.step.lost_trajectories import FailureWatch
from rollmill.flows.step.report import _measure, _measure_rows
from rollmill.flows.step.step_collection import collect_step
from rollmill.flows.step.step_groups import store_batch
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.run_tables import list_held_out, read_held_out_by_env
from rollmill.tasks.rollout.admission import EVALUATION
from rollmill.tasks.rollout.environments.calculator import Calculator
from rollmill.tasks.rollout.environments.guess import Guess
from rollmill.tasks.rollout.episode import SampledTokens
from rollmill.tasks.rollout.trajectory import TrajectoryRequest
from rollmill.tasks.score.scoring import combined_key
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.run.group_ranges import GroupRange, group_numbers, read_plan
from rollmill.tasks.store.verify.run_verification import verify_run
from tests.stubs.toy_settings import toy_config

ENVIRONMENTS = {
    "a": {"weight": 2, "rollout": {"temperature": 0.5}},
    "b": {"rollout": {"long_prompts": "drop"}},
    "c": {"score": {"overlong_tokens": [1, 2]}},
}
ROLLOUT = {"groups_per_step": 4, "max_refill_groups": 2}


def mixed(*overrides: str) -> Any:
    return load("mixed", overrides)


def test_an_environment_has_the_settings_of_the_run_but_for_its_own() -> None:
    config = mixed("environments.guess.rollout.sampling.top_k=3", "rollout.sampling.top_p=0.5")
    each = environment_configs(config)
    assert list(each) == ["addition", "calculator", "guess"]
    assert [own.score.scorer.name for own in each.values()] == ["addition", "calculator", "guess"]
    sampling = each["guess"].rollout.sampling
    assert (sampling.top_k, sampling.top_p, each["addition"].rollout.sampling.top_k) == (3, 0.5, 0)
    assert (each["guess"].evaluate.n_prompts, each["addition"].evaluate.n_prompts) == (128, 256)
    assert group_shares(config).weights == (2, 1, 1)


def test_a_stored_environment_has_only_what_it_overrides() -> None:
    config = mixed()
    stored = config.model_dump(mode="json")
    addition = {"rollout": {"environment": "addition"}, "score": {"scorer": "addition"}, "evaluate": {}}
    assert stored["environments"][0] == {"name": "addition", "weight": 2, **addition}
    assert validate(stored) == config
    forked = validate(apply_overrides(stored, ("environments.guess.weight=7", "rollout.temperature=0.5")))
    assert [each.weight for each in forked.environments] == [2, 1, 7]
    assert environment_configs(forked)["guess"].rollout.temperature == 0.5


def test_a_scorer_of_an_environment_takes_the_place_of_the_runs_sum() -> None:
    config = mixed("score.sum=[{scorer: exact}]", "environments.b.rollout.environment=addition")
    each = environment_configs(config)
    assert each["guess"].score.sum == ()
    assert [term.scorer.name for term in each["b"].score.sum] == ["exact"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("environments.guess.rollout.group_size=2", "rollout.group_size is the same for all environments"),
        ("environments.guess.evaluate.every=2", "evaluate.every is the same for all environments"),
        ("environments.guess.rollout.temprature=2", "no such setting; did you mean rollout.temperature"),
        ("environments.guess.weight=0", r"environments\.guess\.weight = 0"),
        ("environments.all.rollout.environment=guess", "all is the name in metrics of all environments"),
        ("environments.x/y.rollout.environment=guess", r"environments\.x/y\.name = 'x/y'"),
        ("environments=[{name: a},{name: a}]", "a is given twice"),
        (
            "environments.guess.score.judge.url=http://a:b@c",
            r"environments\.guess\.score\.judge\.url = '\*\*\*'",
        ),
        ("environments.x.rollout.environment=prompts", r"environments\.x\.rollout\.prompts\.path = ''"),
        ("environments.guess.score.scorer=", r"environments\.guess\.score\.scorer = ''"),
        ("environments.guess.rollout.max_completion_tokens=256", r"environments\.guess\.rollout\.max_comp"),
        ("retrain.sources=[runs/a]", "environments = .*: training from stored rollouts"),
    ],
)
def test_a_wrong_environment_is_refused_by_the_name_of_its_setting(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        mixed(override)


@pytest.mark.parametrize(
    ("names", "said"), [(("a", "a"), "a is given twice"), ((["a"],), r"environments\..*name = \['a'\]")]
)
def test_names_in_a_presets_list_of_environments_are_checked(
    tmp_path: Path, names: tuple[object, ...], said: str
) -> None:
    preset = tmp_path / "two.yaml"
    preset.write_text(json.dumps({"model": "m", "environments": [{"name": each} for each in names]}))
    for overrides in ((), ("environments.a.weight=2",)):
        with pytest.raises(ConfigError) as refused:
            load(str(preset), overrides)
        assert re.search(said, str(refused.value)) or overrides


def test_sampling_of_any_environment_must_be_corrected_for() -> None:
    config = mixed("environments.guess.rollout.sampling.top_p=0.9")
    assert list_altered(config) == ["environments.guess.rollout.sampling.top_p = 0.9"]
    with pytest.raises(
        ConfigError, match=r"environments\.guess\.rollout\.sampling\.top_p = 0\.9: tokens are"
    ):
        check_sampling(config)


def test_the_form_has_the_environments_and_no_defaults_that_would_override_the_run() -> None:
    config, schema = mixed(), parameter_schema(post_train).model_dump()
    values = FORMS["post-train"].values(config)
    assert validate_form({"run_name": "any", "config": values}, schema) == []
    assert post_train.validate_parameters({"run_name": "any", "config": values})["config"] == config
    shown = schema["properties"]["config"]["properties"]["advanced"]["properties"]["environments"]
    rollout = shown["items"]["properties"]["rollout"]["properties"]
    assert "group_size" not in rollout
    assert "default" not in rollout["temperature"]


def test_a_start_model_depends_on_the_environments_and_their_weights() -> None:
    folders = {
        start_model_folder(mixed(*each)) for each in ((), ("environments.guess.weight=2",), ("seed=1",))
    }
    assert len(folders) == 3
    assert start_model_folder(mixed("environments.guess.rollout.temperature=0.5")) in folders


@pytest.mark.parametrize("run", [(), ("rollout.environment=addition", "score.scorer=addition")])
def test_a_misspelt_environment_is_no_further_one(run: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="did you mean guess") as refused:
        mixed(*run, "environments.gues.weight=4")
    assert refused.value.field == "environments.gues"
    further = mixed(
        "environments.more.rollout.environment=addition", "environments.more.score.scorer=addition"
    )
    assert [each.name for each in further.environments][-1] == "more"


def test_an_agents_start_model_is_that_of_its_problems() -> None:
    alone = toy_config({"rollout": {"environment": "guess"}})
    played = toy_config({"rollout": {"environment": "agent", "agent": {"problems": "guess"}}})
    assert start_model_folder(played) == start_model_folder(alone)
    assert stored_model_folder(played.model_dump(mode="json")) == start_model_folder(alone)
    assert start_model_folder(toy_config({})) != start_model_folder(alone)


def test_scores_of_several_scorers_have_one_key_of_all() -> None:
    assert combined_key({"a": "exact@1", "b": "exact@1"}) == "exact@1"
    keys = {combined_key({"a": "exact@1", "b": f"math@{version}"}) for version in (1, 2)}
    assert len(keys) == 2
    assert {key.partition("@")[0] for key in keys} == {"environments"}


class OneGroupFlat(PlannedScoring):
    """Gives all samples of group 1 the same reward."""

    def reward(self, group: int, sample: int) -> float:
        return 0.5 if group == 1 else float(sample)


def env_of_groups(rows: list[dict[str, Any]]) -> dict[int, str]:
    return {row["group"]: row["env"] for row in rows}


async def collect(run: Run, step: int = 0) -> Any:
    with disable_run_logger():
        return await collect_step.fn(run, step)


async def test_rows_of_a_step_are_of_the_environments_in_their_shares(tmp_path: Path) -> None:
    async with open_planned_run(
        tmp_path, PlannedSampler(), OneGroupFlat(), rollout=ROLLOUT, environments=ENVIRONMENTS
    ) as run:
        found = await collect(run)
        await store_batch(run, 0, found.outcomes)
        rollouts, batch = read_stored(run, "rollouts"), read_stored(run, "batches")
        plan = read_plan(run.folder, 0)
        metrics, _ = _measure(run, 0)
    # The refill of b, which replaces group 1, is numbered after the two of a.
    assert plan == (GroupRange(0, 4), GroupRange(6, 1, "refill"))
    assert env_of_groups(rollouts) == {0: "a", 1: "b", 2: "a", 3: "c", 6: "b"}
    assert Counter(env_of_groups(batch).values()) == {"a": 2, "b": 1, "c": 1}
    assert {(row["env"], row["temperature"]) for row in rollouts} == {("a", 0.5), ("b", 1.0), ("c", 1.0)}
    found_metrics = {(each.name, each.env): each.value for each in metrics}
    counts = [found_metrics["rollout/groups", env] for env in ("all", "a", "b", "c")]
    assert counts == [5.0, 2.0, 2.0, 1.0]
    assert [found_metrics["rollout/refill_groups", env] for env in ("all", "a", "b")] == [1.0, 0.0, 1.0]
    assert found_metrics["rollout/reward", "b"] == 1.0
    assert found_metrics["drops/trajectories", "c"] == 0.0


@pytest.mark.parametrize("n_before_the_end", range(1, 20, 3))
async def test_a_step_that_ends_anywhere_resumes_with_the_same_shares(
    tmp_path: Path, n_before_the_end: int
) -> None:
    class Ending(PlannedSampler):
        async def sample(self, work: TrajectoryRequest, token_ids: np.ndarray, until: float) -> SampledTokens:
            if len(self.sampled) == n_before_the_end:
                whole.cancel()
            return await super().sample(work, token_ids, until)

    # 6 groups in the shares 2:1:1 are no whole numbers.
    settings: Any = {
        "rollout": ROLLOUT | {"groups_per_step": 6, "max_in_flight": GROUP_SIZE},
        "environments": ENVIRONMENTS,
    }
    async with open_planned_run(tmp_path, Ending(), OneGroupFlat(), **settings) as run:
        whole = asyncio.ensure_future(collect(run))
        with suppress(asyncio.CancelledError):
            await whole
    async with open_planned_run(tmp_path, PlannedSampler(), OneGroupFlat(), **settings) as run:
        await store_batch(run, 0, (await collect(run)).outcomes)
        assert not verify_run(run.folder).findings
        await store_batch(run, 1, (await collect(run, 1)).outcomes)
        rows = [row for step in (0, 1) for row in read(run.folder, "rollouts", step=step).to_pylist()]
        batches = [row for step in (0, 1) for row in read(run.folder, "batches", step=step).to_pylist()]
        assert group_numbers(read_plan(run.folder, 0)) == (*range(6), 8)
    assert Counter(env_of_groups(batches).values()) == {"a": 6, "b": 3, "c": 3}
    ids = [row["trajectory_id"] for row in rows]
    assert len(ids) == len(set(ids)) == 13 * GROUP_SIZE
    problems = Counter((row["env"], row["example_id"]) for row in rows)
    assert set(problems.values()) == {GROUP_SIZE}


def test_a_group_that_its_scorer_splits_is_one_trained_group() -> None:
    groups = pl.DataFrame(
        {"group": [4, 4, 5], "reward_mean": [0.5, 1.0, 0.0], "reason": ["", "", "not_whole"]}
    )
    rollouts = pl.DataFrame(
        {"group": [4, 5], "n_completion_tokens": [1, 1], "status": ["complete", "failed"]}
    )
    found = {each.name: each.value for each in _measure_rows(rollouts, groups, [], "all")}
    assert (found["rollout/groups"], found["rollout/groups_trained"]) == (2.0, 1.0)


async def test_environments_with_other_states_are_verified(tmp_path: Path) -> None:
    made = {"a": Guess(), "b": Calculator()}
    async with open_planned_run(
        tmp_path,
        PlannedSampler(),
        PlannedScoring(),
        made,
        rollout={"groups_per_step": 2},
        environments={name: {} for name in made},
    ) as run:
        await store_batch(run, 0, (await collect(run)).outcomes)
        states = {env: read(run.folder, "states", env=env, step=0) for env in made}
        report = verify_run(run.folder)
    assert [rows.num_rows for rows in states.values()] == [GROUP_SIZE, GROUP_SIZE]
    assert states["a"].column_names != states["b"].column_names
    assert not report.findings
    assert not [note for note in report.notes if "could not" in note]


async def test_each_environment_is_evaluated_with_its_prompts_samples_and_temperature(tmp_path: Path) -> None:
    environments = {
        "a": {"rollout": {"temperature": 0.5}, "evaluate": {"n_prompts": 2, "samples": 4}},
        "b": {"evaluate": {"n_prompts": 3, "temperature": 0.7}},
    }
    async with open_planned_run(
        tmp_path, PlannedSampler(), PlannedScoring(), environments=environments, steps=1
    ) as run:
        requests = await plan_held_out(run, 0)
        assert len(requests) == 2 * 5 + 3 * 2
        temperatures = Counter((each.temperature, each.sample) for each in requests)
        assert temperatures == {(0.0, 0): 5, **{(0.5, n): 2 for n in (1, 2, 3, 4)}, (0.7, 1): 3}
        assert not is_evaluated(run, 0)
        failures = FailureWatch(0, len(requests), 1.0, lambda: logging.getLogger("test"))
        with run.held_out_admission.request_slots(len(requests), (0, EVALUATION)) as tickets:
            await evaluate_prompts.fn((run, requests, tickets, failures), 0, 0)
        assert is_evaluated(run, 0)
        rows = read(run.folder, "evaluations", version=0).to_pylist()
        by_env = {row["env"]: row for row in read_held_out_by_env(run.folder).to_dicts()}
        (whole, *_), names = list_held_out(run.folder)[0][1], [env for env, _ in list_held_out(run.folder)]
        (point,) = evaluation_points(run.folder)
    # The planned reward is the sample's number: greedy 0, sampled 1 to 4.
    assert Counter(row["env"] for row in rows) == {"a": 10, "b": 6}
    assert len({row["sampling_seed"] for row in rows if row["env"] == "a" and not row["greedy"]}) == 8
    assert names == ["all", "a", "b"]
    assert [(by_env[env]["n"], by_env[env]["samples"], by_env[env]["reward"]) for env in "ab"] == [
        (2, 4, 2.5),
        (3, 1, 1.0),
    ]
    assert [by_env[env]["pass_at_k"] for env in "ab"] == [1.0, 1.0]
    assert (whole["n"], whole["reward"], whole["pass_at_k"]) == (5, pytest.approx((2 * 2.5 + 3) / 5), None)
    assert point.values["evaluation/reward/a"] == 2.5
    assert point.values["evaluation/n"] == 5
