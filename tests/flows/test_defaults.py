"""Defaults are right for a model of 1 to 8 billion parameters; what a run must be given is asked for by name."""

import json
from pathlib import Path

import pytest

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.settings import apply_overrides, settings, validate
from rollmill.tasks.config import choose_dtype
from rollmill.tasks.errors import ConfigError

GIVEN = {
    "model": "models/some-4b",
    "rollout": {"prompts": {"path": "data.jsonl"}},
    "score": {"scorer": "math"},
}


def test_a_model_prompts_and_a_scorer_make_a_run() -> None:
    config = validate(GIVEN)
    assert (config.model, config.rollout.environment.name, config.score.scorer.name) == (
        "models/some-4b",
        "prompts",
        "math",
    )


@pytest.mark.parametrize(
    ("left_out", "remedy"),
    [
        ("model", "give a folder or a name on the Hugging Face hub"),
        ("rollout.prompts.path", "give the file, folder or name of a data set with prompts"),
        ("score.scorer", "name the scorer that gives rewards: .*math"),
    ],
)
def test_what_is_left_out_is_asked_for(left_out: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as raised:
        validate(apply_overrides(GIVEN, (f"{left_out}=",)))
    assert raised.value.field == left_out


def test_no_default_is_one_that_only_a_toy_survives() -> None:
    """The limits are those of peers' defaults: TRL and prime-rl train at 1e-6; answers of 256 tokens are cut by most tasks."""
    config = RunConfig()
    assert config.train.lr <= 5e-6
    assert config.train.gradient_checkpointing
    assert config.rollout.max_completion_tokens >= 512
    assert config.serve.max_model_len >= config.rollout.max_completion_tokens + 1024
    assert config.train.micro_batch_tokens >= config.serve.max_model_len
    assert config.serve.gpu_memory_utilization <= 0.5, "the trainer may be on the same GPU"
    assert config.train.dtype == config.serve.dtype == choose_dtype()
    assert config.start_model.steps == 0
    assert "addition" not in json.dumps(config.model_dump(mode="json"))


def test_settings_stay_few_enough_to_read() -> None:
    """What nobody changes is a constant: see CONSTANTS in flows/configuration/config.py."""
    assert len(settings()) <= 195


def test_weights_are_bfloat16_where_there_is_a_gpu_and_float32_elsewhere(tmp_path: Path) -> None:
    assert choose_dtype(tmp_path) == "float32"
    (tmp_path / "nvidia-uvm").touch()
    assert choose_dtype(tmp_path) == "float32"
    (tmp_path / "nvidia0").touch()
    assert choose_dtype(tmp_path) == "bfloat16"
