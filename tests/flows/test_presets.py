"""The presets in conf/ load, and say what they need that is not there."""

import asyncio
import re
from pathlib import Path

import polars as pl
import pytest

from rollmill.flows.checks.gpu_assignment import assign_run_gpus
from rollmill.flows.checks.gpu_memory import find_excess, plan_needs
from rollmill.flows.checks.memory_report import imagine_gpus
from rollmill.flows.checks.preflight import preflight
from rollmill.flows.configuration.environments import environment_configs
from rollmill.flows.configuration.presets import ALGORITHMS, PRESETS, preset_name, preset_values
from rollmill.flows.configuration.settings import load
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.rollout.environment import make_environment
from rollmill.tasks.rollout.trajectory_requests import check_prompts
from rollmill.tasks.score.terms import resolve_terms
from rollmill.tasks.train.engine.memory_plan import MODELS


@pytest.mark.parametrize("preset", sorted(each.stem for each in PRESETS.glob("*.yaml")))
def test_every_preset_loads_and_its_scorer_is_there(preset: str) -> None:
    assert all(resolve_terms(each.score) for each in environment_configs(load(preset)).values())


@pytest.mark.parametrize("algorithm", sorted(each.stem for each in ALGORITHMS.glob("*.yaml")))
def test_every_algorithm_joins_every_preset_and_sets_only_the_algorithm(algorithm: str) -> None:
    needed = ("train.kl.model=models/teacher",) if algorithm == "distill" else ()
    for preset in PRESETS.glob("*.yaml"):
        load(f"{preset.stem}+{algorithm}", needed)
    assert set(preset_values(algorithm)) <= {"rollout", "score", "train"}


def test_of_a_setting_that_two_presets_have_the_later_ones_counts(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("train: {lr: 0.25, loss: ppo_clip}")

    assert load(f"quickstart+{mine}+cispo").train.lr == 0.25
    assert load(f"quickstart+{mine}+cispo").train.loss.name == "cispo"
    assert load(f"cispo+quickstart+{mine}").train.loss.name == "ppo_clip"
    assert preset_name(f"quickstart+{mine}+cispo") == "quickstart-mine-cispo"


def test_presets_of_rollmill_are_found_in_any_folder_and_ones_own_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = load("quickstart+dapo")
    monkeypatch.chdir(tmp_path)
    assert load("quickstart+dapo") == here
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "quickstart.yaml").write_text(
        "{steps: 7, model: mine, rollout: {environment: addition}, score: {scorer: exact}}"
    )
    assert load("quickstart").steps == 7


@pytest.mark.parametrize(
    "preset", ["quickstart+quickstart", "quickstart+grpo+grpo", "quickstart+conf/quickstart.yaml"]
)
def test_a_preset_that_is_given_twice_is_refused(preset: str) -> None:
    with pytest.raises(ConfigError, match=r"^preset = .*\.yaml is given twice; give it once$"):
        load(preset)


def test_an_unknown_algorithm_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"preset = 'dappo'.*quickstart.*with \+: .*dapo"):
        load("quickstart+dappo")


def test_an_algorithm_alone_is_refused_with_a_preset_to_join_it_to() -> None:
    with pytest.raises(ConfigError, match=r"preset = 'dapo': .* quickstart\+dapo"):
        load("dapo")


@pytest.mark.parametrize("preset", ["quickstart", "calculator", "mixed"])
def test_presets_that_need_nothing_have_enough_problems(preset: str) -> None:
    for config in environment_configs(load(preset)).values():
        environment = make_environment(config.rollout)
        check_prompts(environment, config.rollout, config.evaluate.n_prompts)


def gsm8k(folder: Path, name: str, n_rows: int) -> str:
    """An override that names a file in the form of that data set."""
    path = folder / f"{name}.parquet"
    rows = [{"question": f"what is {n} + 1?", "answer": f"It is\n#### {n + 1}"} for n in range(n_rows)]
    pl.DataFrame(rows).write_parquet(path)
    return f"rollout.prompts.{name}={path}"


async def test_gsm8k_says_which_file_is_missing_then_which_model(tmp_path: Path) -> None:
    async def missing(*overrides: str) -> str:
        with pytest.raises(ConfigError) as raised:
            await asyncio.to_thread(preflight, load("gsm8k", overrides))
        return str(raised.value)

    assert "rollout.prompts.path = 'data/gsm8k" in await missing()
    train, held_out = gsm8k(tmp_path, "path", 600), gsm8k(tmp_path, "held_out_path", 600)
    assert "rollout.prompts.held_out_path = 'data/gsm8k" in await missing(train)
    assert "model = 'models/Qwen2.5-1.5B-Instruct': not a model folder" in await missing(train, held_out)
    environment = make_environment(load("gsm8k", (train, held_out)).rollout)
    example = await environment.example("held_out", 4)
    assert example.content == {"problem": "what is 4 + 1?", "answer": "5"}


def test_an_environment_cannot_be_called_as_all_of_them_together_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from rollmill.tasks.rollout.environments.addition import Addition\n\n\nclass Own(Addition):\n    name = 'all'\n"
    (tmp_path / "own_environment.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(ConfigError, match=r"rollout\.environment = 'all': this name is reserved"):
        preflight(load("quickstart", ("rollout.environment=own_environment:Own",)))


# By preset: size in GB of the GPUs that its header names.
ON_GPU = {
    each.stem: int(named[1])
    for each in PRESETS.glob("*.yaml")
    if (named := re.search(r"GPU of (\d+) GB", each.read_text()))
}


def test_presets_for_gpus_name_their_memory() -> None:
    assert [*ON_GPU] == ["gsm8k"]


@pytest.mark.parametrize("algorithm", ["", "+grpo", "+reinforce_pp"])
@pytest.mark.parametrize("preset", ON_GPU)
def test_a_preset_fits_with_room_in_the_gpus_that_it_names_with_a_frozen_reference_too(
    preset: str, algorithm: str
) -> None:
    config = load(preset + algorithm)
    sizes = next(each for name, each in MODELS.items() if f"/{name}-" in config.model)
    gpus = imagine_gpus(config, ON_GPU[preset])
    visible = [each.number for each in gpus]
    assigned = assign_run_gpus(config, samples=True, trains=True, visible=visible)
    for gpu in gpus:
        assert sum(plan_needs(config, sizes, assigned, gpu).values()) < 0.9 * gpu.total_bytes
    train = config.train.model_copy(update={"gradient_checkpointing": False})
    assert find_excess(config.model_copy(update={"train": train}), sizes, assigned, gpus[0])
