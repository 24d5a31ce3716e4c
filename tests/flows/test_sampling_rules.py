"""Tokens from another distribution than the trained one are trained on with importance weights, or not at all."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollmill.flows.checks.preflight import preflight
from rollmill.flows.configuration.rules import check_correction, describe_altered
from rollmill.flows.configuration.settings import find_fixed_settings, load
from rollmill.flows.offline.retrain_sources import check_source_sampling
from rollmill.flows.policies.server_parity import ratio_warning
from rollmill.flows.start_model import check_start
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.observe.metrics import Metric
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.immutable_settings import check_immutable
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.train.config import TrainConfig
from tests.stubs.toy_settings import validate_toy

ALTERED = ["rollout.sampling.top_p = 0.9"]
CORRECTED = {"old_logprobs": "trainer", "importance": {"mode": "truncated"}}


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            {},
            r"train\.importance\.mode = 'none': .*top_p = 0\.9.* to truncated and train\.old_logprobs to trainer",
        ),
        (
            {"loss": "reinforce"},
            r"train\.importance\.mode = 'none': .*; set it to truncated, so that each token is",
        ),
        ({"old_logprobs": "trainer"}, r"train\.importance\.mode = 'none': .*; set it to truncated, so that"),
        (
            {"importance": {"mode": "masked"}},
            r"train\.old_logprobs = 'sampler': .* the ratio of the loss ppo_clip would not begin at 1; set it to trainer",
        ),
        (
            {"loss": "my.losses:own", "importance": {"mode": "truncated"}},
            r"train\.old_logprobs = 'sampler': .* loss my\.losses:own",
        ),
        (
            {"old_logprobs": "trainer", "importance": {"mode": "truncated", "level": "sequence_mean"}},
            r"train\.importance\.level = 'sequence_mean': .*set it to token",
        ),
    ],
)
def test_training_that_would_ignore_the_difference_is_refused_with_the_correction(
    train: dict[str, Any], message: str
) -> None:
    check_correction(TrainConfig(**train), [])
    with pytest.raises(ConfigError, match=message):
        check_correction(TrainConfig(**train), ALTERED)


@pytest.mark.parametrize(
    "train",
    [
        CORRECTED,
        {"old_logprobs": "trainer", "importance": {"mode": "masked", "bounds": [0.5, 5.0]}},
        {"loss": "reinforce", "importance": {"mode": "truncated"}},
        {"loss": "gspo", **CORRECTED},
    ],
)
def test_importance_weights_correct_it(train: dict[str, Any]) -> None:
    check_correction(TrainConfig(**train), ALTERED)


def test_a_run_is_refused_before_anything_is_opened_and_one_that_only_collects_is_not() -> None:
    # Neither has its model: a run that is not refused for its sampling is refused for that.
    config = validate_toy({"model": "nowhere", "rollout": {"sampling": {"top_k": 5}}})
    with pytest.raises(ConfigError, match=r"train\.importance\.mode = 'none': rollout\.sampling\.top_k = 5"):
        preflight(config)
    with pytest.raises(ConfigError, match=r"^model = 'nowhere'"):
        preflight(config, trains=False)


async def test_a_flow_that_no_command_started_refuses_it_too() -> None:
    config = validate_toy({"rollout": {"sampling": {"top_k": 5}}})
    with pytest.raises(ConfigError, match=r"train\.importance\.mode = 'none': rollout\.sampling\.top_k = 5"):
        await check_start("never-begun", config)


def make_source(root: Path, rollout: dict[str, Any]) -> str:
    folder = RunFolder(str(root / "source"))
    config = validate_toy({"rollout": rollout})
    values = config.model_dump(mode="json")
    OpenRun.open(folder, config=values, fixed={}, versions={}, git_commit="", config_of=config.store).close()
    return folder.location


def test_stored_rollouts_of_another_distribution_are_trained_on_with_the_correction_alone(
    tmp_path: Path,
) -> None:
    source = make_source(tmp_path, {"sampling": {"min_p": 0.1}})
    retrain = {"retrain": {"sources": [source]}}
    with pytest.raises(
        ConfigError, match=r"train\.importance\.mode = 'none': rollout\.sampling\.min_p = 0\.1"
    ):
        check_source_sampling(validate_toy(retrain), [source])
    altered = check_source_sampling(validate_toy({**retrain, "train": CORRECTED}), [source])
    assert altered == ["rollout.sampling.min_p = 0.1"]


def test_a_reference_deployment_refuses_stored_rollouts_of_another_temperature_before_anything_starts(
    tmp_path: Path,
) -> None:
    source = make_source(tmp_path, {"temperature": 0.7})
    kl = {"coef": 0.1, "reference": "deployment", "urls": ["http://127.0.0.1:9"]}
    settings = {"retrain": {"sources": [source]}, "train": CORRECTED | {"kl": kl}}
    with pytest.raises(ConfigError, match=r"sampled at rollout\.temperature 0\.7"):
        check_source_sampling(validate_toy(settings), [source])


def test_stored_rollouts_of_a_run_older_than_these_settings_need_no_correction(tmp_path: Path) -> None:
    source = make_source(tmp_path, {})
    manifest = Path(source) / "run.json"
    stored = json.loads(manifest.read_text())
    del stored["config"]["rollout"]["sampling"]
    manifest.write_text(json.dumps(stored))
    assert check_source_sampling(validate_toy({"retrain": {"sources": [source]}}), [source]) == []


def test_a_run_older_than_these_settings_is_resumed_with_their_defaults_and_with_no_other() -> None:
    fixed = find_fixed_settings()
    stored = validate_toy().model_dump(mode="json")
    for name in ("sampling", "max_prompt_tokens", "long_prompts"):
        del stored["rollout"][name]
    check_immutable("run", stored, validate_toy().model_dump(mode="json"), fixed)
    given = validate_toy({"rollout": {"sampling": {"stop": ["="]}, "max_prompt_tokens": 9}})
    with pytest.raises(
        Exception, match=r"max_prompt_tokens: the run has 0, given is 9\n.*sampling\.stop: the run has \[\]"
    ):
        check_immutable("run", stored, given.model_dump(mode="json"), fixed)


def test_the_run_says_at_its_start_which_setting_makes_the_difference_and_a_plain_run_nothing() -> None:
    config = load("quickstart", ("rollout.sampling.top_p=0.9", "rollout.sampling.stop=[x]"))
    line = describe_altered(config.rollout.sampling.list_altered())
    assert line.startswith("rollout.sampling.top_p = 0.9: stored log-probabilities are those of")
    assert "train.importance" in line
    assert describe_altered(load("quickstart").rollout.sampling.list_altered()) == ""


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}])
def test_ratios_of_another_distribution_are_no_sign_of_other_weights(sampling: dict[str, Any]) -> None:
    settings = validate_toy({"rollout": {"sampling": sampling}, "train": CORRECTED})
    mismatch = [Metric("train/mismatch_nats", "all", "mean", 0.3)]
    assert bool(ratio_warning(settings, 3, mismatch)) is not bool(sampling)
