"""What a run that trains from stored rollouts is refused for, before anything starts."""

from pathlib import Path

import pytest

from rollmill.flows.commands.stored_runs import rescore_config
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.offline.retrain_sources import check_offline
from rollmill.flows.offline.unscored import check_rescoring
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.writable_run import OpenRun
from tests.stubs.toy_settings import validate_toy


def offline(**sections: object) -> RunConfig:
    retrain = {"sources": ["runs/a"], "scores": "short@1"}
    return validate_toy({"retrain": retrain} | sections)


def test_held_out_trajectories_are_not_scored_by_another_scorer_unawares() -> None:
    with pytest.raises(ConfigError, match=r"scored by addition@1: set score\.scorer") as raised:
        check_offline(offline())

    assert raised.value.field == "retrain.scores"
    check_offline(offline(evaluate={"every": 0}))
    check_offline(offline(evaluate={"scorer": "addition"}))
    check_offline(offline(retrain={"sources": ["runs/a"], "scores": "addition@1"}))


def test_a_run_without_sources_is_refused() -> None:
    with pytest.raises(ConfigError, match="name the runs"):
        check_offline(offline(retrain={}))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    config = {"score": {"scorer": "exact", "workers": 2}}
    opened = OpenRun.open(
        RunFolder(tmp_path), config=config, fixed={}, versions={}, git_commit="", config_of=StoreConfig()
    )
    opened.close()
    return RunFolder(tmp_path)


def test_rescoring_uses_the_runs_settings_and_the_given_ones(run: RunFolder) -> None:
    config = rescore_config(run, ["score.timeout_s=3"], scorer="math", steps="2:5")

    assert (config.score.scorer.name, config.score.workers, config.score.timeout_s) == ("math", 2, 3.0)
    assert (config.first_step, config.last_step) == (2, 4)
    assert rescore_config(run, [], steps=":3").last_step == 2
    assert rescore_config(run, [], steps="3:").first_step == 3
    for wrong in ("3", "a:b", ":0"):
        with pytest.raises(ConfigError, match="write A:B"):
            rescore_config(run, [], steps=wrong)


def test_a_scorer_of_groups_is_refused_for_held_out_trajectories(run: RunFolder) -> None:
    judge = ["score.judge.model=m", "score.judge.url=http://localhost/v1"]
    with pytest.raises(ConfigError, match="one by one"):
        check_rescoring(run, rescore_config(run, judge, scorer="ruler", evaluations=True))


def test_a_choice_of_groups_is_refused_for_held_out_trajectories_and_may_be_given_by_an_option(
    run: RunFolder,
) -> None:
    config = rescore_config(run, [], where="env = 'addition'", evaluations=True)
    assert config.where == "env = 'addition'"
    with pytest.raises(ConfigError, match="in no group that `where` could choose"):
        check_rescoring(run, config)


def test_bounds_without_any_step_are_refused(run: RunFolder) -> None:
    with pytest.raises(ConfigError, match="no step is from first_step = 5 to last_step = 2"):
        check_rescoring(run, rescore_config(run, [], steps="5:3"))
