"""Which arms `rollmill ab` trains, and what it refuses before anything starts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_policies import Rewards, begin_run, store_evaluation, store_rows

from rollmill.flows.commands.stored_runs import rescore_config
from rollmill.flows.offline.ab_arms import AbComparison
from rollmill.flows.offline.ab_scorers import check_scorer_state, estimate_arm
from rollmill.tasks.errors import ConfigError, RunMismatchError
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.manifest import Manifest, read_manifest, write_manifest

N_PROMPTS, SAMPLES = 40, 1
JUDGE = ("score.judge.model=m", "score.judge.url=http://localhost/v1")
Compare = Callable[..., AbComparison]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run with one step of two groups, scored by addition@1, and an evaluation of its start model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    algorithms = tmp_path / "conf" / "algorithms"
    algorithms.mkdir(parents=True)
    (algorithms / "rloo.yaml").write_text("score: {advantage: rloo}")
    (tmp_path / "conf" / "task.yaml").write_text("steps: 3")
    folder = RunFolder(tmp_path / "runs" / "source")
    begin_run(folder, tmp_path / "model", N_PROMPTS, SAMPLES, steps=1)
    store_evaluation(folder, Rewards(np.ones(N_PROMPTS), np.ones((N_PROMPTS, SAMPLES))), version=0)
    places = [(group, sample) for group in range(2) for sample in range(4)]
    rows: dict[str, Any] = {
        "group": [group for group, _ in places],
        "sample": [sample for _, sample in places],
        "trajectory_id": [f"r.{group}.{sample}.0" for group, sample in places],
        "status": ["complete"] * len(places),
    }
    answer = json.dumps([{"role": "assistant", "content": "1"}])
    said = {"messages": answer, "example": "{}", "outcome": "{}", "n_completion_tokens": 1}
    rollouts = rows | {name: [value] * len(places) for name, value in said.items()}
    store_rows(folder, "rollouts", rollouts, step=0)
    store_rows(
        folder,
        "scores",
        {**rows, "status": ["scored"] * 8, "reward": [1.0, 0, 0, 1] * 2},
        scorer="addition@1",
        step=0,
    )
    store_rows(
        folder,
        "scores",
        {**rows, "status": ["scored"] * 8, "reward": [0.0, 0, 1, 1] * 2},
        scorer="digits@1",
        step=0,
    )
    store_rows(folder, "groups", {"group": [0, 1], "expected": [4, 4]}, step=0)
    store_rows(folder, "batches", {"trajectory_id": ["r.0.0.0"]}, step=0)
    return folder


@pytest.fixture
def compare(source: RunFolder) -> Compare:
    return lambda *scorers, **options: AbComparison("source", scorers, **options)


def test_one_scorer_is_compared_with_that_of_the_run(source: RunFolder, compare: Compare) -> None:
    compared = compare("digit_scorer:DigitScorer")
    compared.check()

    first, second = compared.arms
    assert [first.label, second.label] == ["addition@1", "digits@1"]
    assert [first.run_name, second.run_name] == ["source-ab-addition-1", "source-ab-digits-1"]
    assert second.folder.absolute == f"{source.absolute}-ab-digits-1"
    assert second.config.retrain.sources == (source.absolute,)
    assert (second.config.retrain.scores, second.config.score.scorer.name) == (
        "digits@1",
        "digit_scorer:DigitScorer",
    )
    assert (first.config.evaluate.every, first.config.evaluate.n_prompts) == (0, N_PROMPTS)
    assert compared.list_unscored() == []


@pytest.mark.parametrize("override", ["retrain.sources=[other]", "retrain.scores=addition@1"])
def test_what_an_arm_is_trained_from_cannot_be_set(override: str, compare: Compare) -> None:
    field = override.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"{field} = .*every arm trains from the rollouts of RUN"):
        compare("digit_scorer:DigitScorer", overrides=(override,)).check()


def test_each_scorer_is_trained_with_each_algorithm(compare: Compare) -> None:
    both = compare(
        "digit_scorer:DigitScorer", "addition", algorithms=("rloo",), overrides=("steps=7",), name="x"
    )
    alone = compare(algorithms=("rloo",))

    assert [each.label for each in both.arms] == ["digits@1, rloo", "addition@1, rloo"]
    assert [each.run_name for each in both.arms] == ["x-ab-digits-1-rloo", "x-ab-addition-1-rloo"]
    assert {(each.config.score.advantage.name, each.config.steps) for each in both.arms} == {("rloo", 7)}
    assert [each.label for each in alone.arms] == ["addition@1", "addition@1, rloo"]


def test_a_scorer_with_other_arguments_is_another_arm(compare: Compare) -> None:
    name = "digit_scorer:count_digit"
    compared = compare(*(f"{{name: {name}, args: {{digit: {digit}}}}}" for digit in (1, 2)))
    keys = list(compared.terms)
    assert len(set(keys)) == 2
    assert all(key.startswith("digit_scorer.count_digit@1-") for key in keys)
    assert [arm.config.score.scorer.args for arm in compared.arms] == [{"digit": 1}, {"digit": 2}]
    assert compared.list_arguments() == [
        f'{key} is {name} {{"digit": {digit}}}' for digit, key in enumerate(keys, 1)
    ]
    with pytest.raises(ConfigError, match=r"score\.scorer\.args = {'digt': 1}: there is no digt"):
        _ = compare(f"{{name: {name}, args: {{digt: 1}}}}").arms


def test_an_override_changes_the_scorer_of_every_arm_as_it_changes_that_of_a_rescoring(
    source: RunFolder, compare: Compare
) -> None:
    Path("conf/algorithms/mean.yaml").write_text("score: {advantage: mean}")
    name, override = "digit_scorer:count_digit", "score.scorer.args.digit=3"
    compared = compare(name, algorithms=("rloo", "mean"), overrides=(override,))
    scorers = [arm.config.score.scorer for arm in compared.arms]
    assert scorers == [rescore_config(source, [override], scorer=name).score.scorer] * 2
    assert scorers[0].args == {"digit": 3}
    with pytest.raises(ConfigError, match=r"score\.scorer\.args = {'digit': 3}: there is no digit"):
        _ = compare("addition", name, overrides=(override,)).arms


@pytest.mark.parametrize(
    ("scorers", "options", "message"),
    [
        ((), {}, "name a scorer"),
        (("addition",), {}, "and so is the scorer of the run"),
        (("exact", "exact"), {}, "it is exact@1, and so is exact"),
        (("ruler",), {"overrides": JUDGE}, "held-out answers, which every arm is compared by"),
        (("exact",), {"algorithms": ("task", "rloo")}, "give a name in conf/algorithms"),
        (("exact",), {"algorithms": ("rloo", "rloo")}, "given twice"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    compare: Compare, scorers: tuple[str, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        compare(*scorers, **options).check()


def test_an_arm_of_other_settings_is_refused_and_more_steps_continue_it(
    source: RunFolder, compare: Compare
) -> None:
    arm = compare("digit_scorer:DigitScorer").arms[1]
    config = arm.config.model_dump(mode="json")
    stored = replace(read_manifest(source), config=config)
    arm.folder.tmp.mkdir(parents=True)
    write_manifest(open_files(arm.folder), stored, None)

    again = compare("digit_scorer:DigitScorer", overrides=("serve.max_model_len=128", "steps=5"))
    again.check()
    assert (arm.is_trained, again.arms[1].is_trained) == (True, False)
    other = compare("digit_scorer:DigitScorer", overrides=("train.lr=0.5",))
    with pytest.raises(RunMismatchError, match=r"source-ab-digits-1 was trained with other .*: train\.lr: "):
        other.check()
    other.check(trains=False)


def test_a_run_with_several_environments_or_without_rollouts_is_refused(
    source: RunFolder, compare: Compare
) -> None:
    stored = read_manifest(source)

    def set_config(**values: Any) -> Manifest:
        changed = replace(stored, config=stored.config | values)
        write_manifest(open_files(source), changed, read_manifest(source))
        return changed

    set_config(environments=[{"name": "a"}, {"name": "b"}])
    with pytest.raises(ConfigError, match="several environments"):
        compare("exact").check()
    set_config()
    begin_run(RunFolder(source.local.parent / "other"), source.local, 1, 1)
    with pytest.raises(ConfigError, match="no rollouts"):
        AbComparison("other", ("exact",)).check()


def test_the_runs_evaluation_of_the_start_model_is_used_if_it_was_made_alike(compare: Compare) -> None:
    assert compare("exact").has_reference
    assert not compare("exact", overrides=("evaluate.temperature=0.5",)).has_reference
    assert not compare("exact", overrides=("seed=5",)).has_reference
    assert not compare("exact", overrides=("rollout.prompts.system=Be brief.",)).has_reference


def test_the_estimate_of_an_arm_has_its_gain_under_each_scorer(compare: Compare) -> None:
    compared = compare("digit_scorer:DigitScorer")

    by_own, by_digits = (estimate_arm(compared, arm) for arm in compared.arms)

    # The two scorers agree on half of each group.
    assert by_own.gains[0] == pytest.approx(by_digits.gains[1])
    assert by_own.gains[0] > 0.3
    assert by_own.gains[1] == pytest.approx(0.0)
    assert (by_own.n_trained, by_own.n) == (2, 8)
    assert (
        compare("digit_scorer:DigitScorer", where='"group" = 1').arms[0].config.retrain.where == '"group" = 1'
    )


def test_a_condition_limits_what_is_scored_unless_it_is_on_rewards(compare: Compare) -> None:
    compared = compare("exact", where="step < 1")
    by_reward = compare("exact", where="reward > 0")

    assert compared.rescore_config("exact@1").where == "step < 1"
    assert by_reward.rescore_config("exact@1").where == ""


@pytest.mark.slow
async def test_a_scorer_whose_stored_rewards_are_others_was_changed_without_a_new_version(
    compare: Compare,
) -> None:
    compared = compare("digit_scorer:DigitScorer")

    with pytest.raises(
        ConfigError, match=r"is stored with the reward 0\.0, and now gets 0\.125: .* raise its version"
    ):
        await check_scorer_state(compared, "digits@1")


async def test_a_scorer_that_declares_whether_it_keeps_state_is_not_tried(
    compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    import digit_scorer

    monkeypatch.setattr(digit_scorer.DigitScorer, "keeps_state", False, raising=False)
    await check_scorer_state(compare("digit_scorer:DigitScorer"), "digits@1")
    monkeypatch.setattr(digit_scorer.DigitScorer, "keeps_state", True)
    with pytest.raises(ConfigError, match="it declares keeps_state = True"):
        await check_scorer_state(compare("digit_scorer:DigitScorer"), "digits@1")


def test_arms_have_no_attached_server_of_the_run_and_keep_how_groups_are_drawn(
    source: RunFolder, compare: Compare
) -> None:
    stored = read_manifest(source)
    serve = stored.config.get("serve", {}) | {"urls": ["http://localhost:1"]}
    write_manifest(open_files(source), replace(stored, config={**stored.config, "serve": serve}), stored)
    overrides = ("retrain.weight=reward_std", "retrain.where=step < 3")
    for arm in compare("digit_scorer:DigitScorer", overrides=overrides).arms:
        assert arm.config.serve.urls == ()
        assert (arm.config.retrain.weight, arm.config.retrain.where) == ("reward_std", "step < 3")
        assert arm.config.retrain.sources == (source.absolute,)
