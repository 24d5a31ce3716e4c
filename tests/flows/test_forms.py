"""The run form of each flow: what people change first, the rest as advanced, nothing that the flow does not read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import Flow
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import validate
from stored_policies import begin_run

from rollmill.flows.annotate import annotate
from rollmill.flows.collect import collect
from rollmill.flows.configuration.config import AnnotateConfig, RescoreConfig, RunConfig
from rollmill.flows.configuration.forms import FORMS, merge_advanced
from rollmill.flows.configuration.rules import check_config
from rollmill.flows.configuration.settings import load, settings
from rollmill.flows.evaluate import evaluate
from rollmill.flows.post_train import post_train
from rollmill.flows.rescore import rescore
from rollmill.flows.retrain import retrain
from rollmill.flows.run.live_run import _open_store
from rollmill.tasks.errors import ConfigError, RunMismatchError
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.manifest import read_manifest

FLOWS: list[Flow[..., Any]] = [post_train, collect, evaluate, retrain, rescore, annotate]
CONFIGS = {rescore: RescoreConfig, annotate: AnnotateConfig}
FIRST = 25
READ = {
    "post-train": {"train.lr", "checkpoint.every", "evaluate.every", "sync.transport"},
    "collect": {"rollout.group_size", "score.scorer", "serve.servers"},
    "evaluate": {"evaluate.n_prompts", "train.dtype", "serve.servers"},
    "retrain": {"retrain.sources", "rollout.groups_per_step", "train.lr", "evaluate.every"},
    "rescore": {"score.scorer", "first_step"},
    "annotate": {"teacher", "serve.servers"},
}
NOT_READ = {
    "post-train": {"retrain.sources"},
    "collect": {"train.lr", "checkpoint.every", "evaluate.every", "sync.transport", "retrain.sources"},
    "evaluate": {"train.lr", "checkpoint.every", "retrain.sources"},
    "retrain": {"rollout.max_refill_groups", "rollout.max_staleness"},
    "rescore": {"rollout.group_size", "train.lr"},
    "annotate": {"rollout.group_size", "train.lr"},
}


def fields(section: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of a form's fields in the order in which Prefect shows them."""
    for name, field in sorted(section["properties"].items(), key=lambda each: each[1]["position"]):
        if "properties" in field:
            yield from fields(field, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def form(flow: Flow[..., Any]) -> dict[str, Any]:
    """The form of the parameter `config`, as Prefect has it."""
    found: dict[str, Any] = parameter_schema(flow).model_dump()["properties"]["config"]
    return found


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_the_first_fields_are_those_that_people_change_and_the_others_are_advanced(
    flow: Flow[..., Any],
) -> None:
    shown = list(fields(form(flow)))
    basic = [name for name in shown if not name.startswith("advanced.")]
    assert shown[: len(basic)] == basic
    assert 5 <= len(basic) <= FIRST + 1
    assert len({name.removeprefix("advanced.") for name in shown}) == len(shown)


def test_the_form_of_a_run_begins_with_model_steps_and_what_is_sampled() -> None:
    shown = list(fields(form(post_train)))
    assert shown[:5] == ["model", "steps", "seed", "rollout.environment", "rollout.prompts.path"]
    assert shown[FIRST - 1] == "serve.gpu_memory_utilization"
    assert shown[FIRST].startswith("advanced.")


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_a_form_has_the_settings_that_its_flow_reads_and_no_others(flow: Flow[..., Any]) -> None:
    shown = {name.removeprefix("advanced.") for name in fields(form(flow))}
    assert shown <= settings(CONFIGS.get(flow, RunConfig)).keys()
    assert shown >= READ[flow.name]
    assert not shown & NOT_READ[flow.name]


@pytest.mark.parametrize("flow", FLOWS[:4], ids=lambda flow: flow.name)
def test_settings_are_the_same_by_way_of_the_form(flow: Flow[..., Any]) -> None:
    config = load("quickstart", ("train.weight_decay=1e-7", "train.threads=2", "evaluate.n_prompts=9"))
    values = FORMS[flow.name].values(config)
    assert validate({"run_name": "any", "config": values}, parameter_schema(flow).model_dump()) == []
    shown = {name.removeprefix("advanced.") for name in fields(form(flow))}
    read = flow.validate_parameters({"run_name": "any", "config": values})["config"]
    assert isinstance(read, RunConfig)
    differing = {
        name for name in settings() if value(read.model_dump(), name) != value(config.model_dump(), name)
    }
    assert not differing & shown


def value(values: dict[str, Any], name: str) -> Any:
    for part in name.split("."):
        values = values[part]
    return values


def test_an_unknown_setting_is_refused_by_the_form_at_either_level() -> None:
    schema = parameter_schema(post_train).model_dump()
    for wrong in ({"train": {"rate": 1}}, {"advanced": {"train": {"rate": 1}}}, {"rate": 1}):
        assert validate({"run_name": "any", "config": wrong}, schema)


def test_plain_settings_are_not_changed() -> None:
    assert merge_advanced({"train": {"lr": 1.0}}) == {"train": {"lr": 1.0}}
    assert merge_advanced(
        {"train": {"lr": 1.0}, "advanced": {"train": {"weight_decay": 2.0}, "seed": 3}}
    ) == {
        "train": {"lr": 1.0, "weight_decay": 2.0},
        "seed": 3,
    }


def test_what_the_machine_decides_is_left_to_the_machine_that_runs() -> None:
    """A machine without a GPU may deploy runs to machines that have one."""
    given = {"model": "m", "rollout": {"prompts": {"path": "p.jsonl"}}, "train": {"dtype": "float32"}}
    advanced = FORMS["post-train"].values(RunConfig.model_validate(given))["advanced"]
    assert advanced["train"]["dtype"] == "float32"
    assert "dtype" not in advanced["serve"]
    assert advanced["serve"]["request_timeout_s"] == RunConfig().serve.request_timeout_s


@pytest.mark.parametrize("flow", ["collect", "evaluate"])
@pytest.mark.parametrize(
    "words",
    [
        ("model=m", "start_model.steps=0", "serve.max_model_len=16384", "train.micro_batch_tokens=16384"),
        ("score.advantage=zero", "train.kl.coef=1", "train.kl.reference=frozen", "train.kl.model=m"),
    ],
)
def test_settings_of_training_that_a_form_hides_refuse_no_flow_that_trains_nothing(
    flow: str, words: tuple[str, ...]
) -> None:
    shown = FORMS[flow].values(load("quickstart", words))
    config = RunConfig.model_validate(merge_advanced(shown))
    with pytest.raises(ConfigError, match="train"):
        check_config(config)
    check_config(config, trains=False)


def test_a_retrained_run_is_evaluated_with_the_form_which_has_no_sources(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    begin_run(run, tmp_path / "model", 2, 1, retrain={"sources": ["/other"]})
    stored = read_manifest(run).config
    stored["store"]["root"] = str(tmp_path)
    shown = FORMS["evaluate"].values(RunConfig.model_validate(stored))
    config = RunConfig.model_validate(merge_advanced(shown))
    _open_store("run", config, adds=True, trains=True).close()
    other = config.model_copy(update={"seed": 7})
    with pytest.raises(RunMismatchError, match="seed"):
        _open_store("run", other, adds=True, trains=True)
