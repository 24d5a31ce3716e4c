"""Settings that contradict each other, or name what there is not, stop before anything is started."""

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import chat_templates
import numpy as np
import pytest
from model_families import save_byte_tokenizer
from stored_policies import Rewards, begin_run, store_evaluation

from rollmill.flows.checks import gpu_assignment
from rollmill.flows.checks import preflight as preflight_module
from rollmill.flows.checks.preflight import check_architecture, check_rope, preflight, preflight_in_turn
from rollmill.flows.commands import new_runs, stored_runs
from rollmill.flows.commands.new_runs import fork_config, fork_here, prepare_fork
from rollmill.flows.commands.stored_runs import (
    check_replay_options,
    evaluate_config,
    evaluate_here,
    retrain_config,
)
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.rules import list_warnings
from rollmill.flows.configuration.settings import apply_overrides, load, parse_settings
from rollmill.flows.run.live_run import describe_missing_loss
from rollmill.tasks.errors import ConfigError, RunMismatchError
from rollmill.tasks.processes.gpus import read_gpus
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import publish_text
from rollmill.tasks.store.folders import CHECKPOINT_MARKER, RunFolder
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.schemas import dataset_schema, make_batch
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.user_code.plug_in import PlugIn


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["score.overlong_tokens=[247, 256]"],
            r"score\.overlong_tokens = \[247, 256\]: no completion can be that long: .* give at most 255",
        ),
        (
            ["score.overlong_tokens=[9]"],
            r"score\.overlong_tokens = \[9\]: must be two lengths in tokens \[A, B\]",
        ),
        (
            ["score.overlong_tokens=[0, 20]"],
            r"score\.overlong_tokens = \[0, 20\]: must be .* 0 < A < B",
        ),
        (["score.overlong_tokens=[20, 20]"], r"score\.overlong_tokens = \[20, 20\]: must be .* 0 < A < B"),
        (
            ["train.micro_batch_tokens=255"],
            r"train\.micro_batch_tokens = 255: must be at least as long as the longest sequence: serve\.max_model_len is 256",
        ),
        (
            ["rollout.groups_per_step=1", "train.ranks=4", "train.updates_per_step=3"],
            r"rollout\.groups_per_step = 1: a step samples 8 trajectories .*train\.ranks = 4 .* fewer ranks or updates",
        ),
        (
            ["train.loss=gspo", "train.loss.args.power=2"],
            r"train\.loss\.args = .*gspo takes none; it has its settings in train",
        ),
        (
            ["train.kl.coef=0.1"],
            r"train\.kl\.reference = 'none': train\.kl\.coef = 0\.1 needs a reference .* or train\.kl\.coef to 0",
        ),
        (
            ["train.kl.reference=stored", "train.kl.teacher=big"],
            r"train\.kl\.reference = 'stored': .* for `rollmill retrain`; a run that samples has new ones: set it to frozen",
        ),
        (
            ["train.kl.teacher=big"],
            r"train\.kl\.teacher = 'big': is the name of a teacher .* for train\.kl\.reference: stored alone, and that is none",
        ),
        (
            ["train.kl.reference=stored", "retrain.sources=[runs/others]"],
            r"train\.kl\.teacher = '': is the name of a teacher .* and that is stored",
        ),
        (["score.advantage=zero"], r"train\.kl\.coef = 0\.0: must be above 0 with score\.advantage: zero"),
        (
            ["score.advantage=zero", "train.kl.coef=1", "train.kl.reference=frozen"],
            r"train\.kl\.model = '': give the teacher's folder, or its name on the Hugging Face hub: without it .* nothing to teach",
        ),
        (["train.kl.reference=deployment"], r"train\.kl\.urls = \[\]: give the addresses"),
        (
            ["train.kl.reference=deployment", "train.kl.urls=[http://h:1]", "rollout.temperature=0.7"],
            r"rollout\.temperature = 0\.7: must be 1 with train\.kl\.reference: deployment",
        ),
        (
            ["train.kl.coef=0.1"],
            r"train\.kl\.reference = 'none': train\.kl\.coef = 0\.1 needs a reference policy: set .* to frozen",
        ),
        (
            ["train.normalization=fixed_length", "train.normalization_tokens=0"],
            r"train\.normalization_tokens = 0: normalization fixed_length needs the length",
        ),
        (
            ["rollout.max_refill_group=2"],
            r"there is no such setting; did you mean rollout\.max_refill_groups\?",
        ),
        (["observe.task_runs=group"], r"observe\.task_runs = 'group': .*; did you mean groups\?"),
        (
            ["train.replay_routing=true"],
            r"train\.replay_routing = True: replays the experts stored with the rollouts: set rollout\.keep_routing=true",
        ),
        (
            ["train.offload=optimizer_and_weights", "train.zero_stage=2"],
            r"train\.offload = 'optimizer_and_weights': .* train\.zero_stage must be at least 3; it is 2: raise it",
        ),
        (
            ["serve.extra_args=[--logprobs_mode=raw_logprobs]"],
            r"serve\.extra_args = .*: --logprobs-mode: the trainer needs the log-probabilities",
        ),
        (
            ["serve.extra_args=[--data_parallel_size, '2']"],
            r"serve\.extra_args = .*: --data-parallel-size: servers with data parallelism cannot take new weights",
        ),
        (["rollout.temperature=0.005"], r"rollout\.temperature = 0\.005: .*greater than or equal to 0\.01"),
        (
            ["serve.dtype=bfloat16", "serve.extra_args=['--hf-overrides={\"a\": 1}']"],
            r"serve\.extra_args = .*: --hf-overrides with all its values replaces the head_dtype",
        ),
        (
            ["rollout.chat_template_kwargs=[1]"],
            r"rollout\.chat_template_kwargs = \[1\]: Input should be a valid string",
        ),
        (
            ["rollout.chat_template_kwargs={since: 2026-01-01}"],
            r"rollout\.chat_template_kwargs = .*: Input should be a valid string",
        ),
        (
            ["rollout.chat_template_kwargs='{1}'"],
            r"rollout\.chat_template_kwargs = '\{1\}': give a JSON object, such as \{\"enable_thinking\": false\}",
        ),
        (
            ['rollout.chat_template_kwargs={"tools": []}'],
            r"rollout\.chat_template_kwargs = .*: tools is no argument of a template",
        ),
        (
            ["rollout.chat_template=my.jinja"],
            r"rollout\.chat_template = 'my\.jinja': is for a given model: .* set start_model\.steps=0",
        ),
        (["train.dtype=bfloat"], r"train\.dtype = 'bfloat': .*; did you mean bfloat16\?"),
    ],
)
def test_contradictions_are_refused_with_what_to_change(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("quickstart", tuple(settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["rollout.max_refill_groups=9999"],
            r"rollout\.max_refill_groups = 9999: environment addition has \d+ training problems.* at most \d+ refills",
        ),
        (
            ["score.overlong_tokens=[16, 25]"],
            r"score\.overlong_tokens = \[16, 25\]: .* at most rollout\.max_completion_tokens = 24 tokens",
        ),
        (
            ["train.replay_routing=true", "rollout.keep_routing=true"],
            r"train\.replay_routing = True: the start model is not a mixture of experts",
        ),
        (["rollout.environment=adition"], r"rollout\.environment = 'adition': .* did you mean addition\?"),
        (
            ["train.kl.reference=frozen", "train.kl.model=nowhere"],
            r"train\.kl\.model = 'nowhere': not a model folder",
        ),
        (["score.advantage=mean_st"], r"score\.advantage = 'mean_st': .* did you mean mean_std\?"),
        (
            ["score.advantage=math:sqrt"],
            r"score\.advantage = 'math:sqrt': tried on the rewards \[0\.0, 1\.0\]",
        ),
        (["train.loss=gpso"], r"train\.loss = 'gpso': .* did you mean gspo\?"),
        (["sync.host=203.0.113.1"], r"sync\.host = '203\.0\.113\.1': it is no address of this machine"),
        (["sync.host=nosuch.invalid"], r"sync\.host = 'nosuch\.invalid': it is no address of this machine"),
        (["sync.host="], r"sync\.host = '': give one address"),
        (["sync.host=0.0.0.0"], r"sync\.host = '0\.0\.0\.0': give one address"),
        (
            ["score.scorer=math:pow"],
            r"score\.scorer = 'math:pow': .* called with one argument, what it scores: missing a required argument: 'y'",
        ),
        (["score.scorer=calcualtor"], r"score\.scorer = 'calcualtor': .* did you mean calculator\?"),
    ],
)
def test_errors_that_the_stages_find_are_raised_before_the_start(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preflight(load("quickstart", tuple(settings)))


def test_arguments_of_a_template_may_be_written_as_a_mapping() -> None:
    given = load("quickstart", ('rollout.chat_template_kwargs={"enable_thinking": false}',))
    assert given.rollout.chat_template_kwargs == '{"enable_thinking": false}'


@pytest.mark.parametrize(
    ("template", "environment", "message"),
    [
        (
            chat_templates.PHI3,
            "Tools",
            "leaves out text of a message of role tool ('answer'); give a template",
        ),
        (chat_templates.GEMMA3, "Tools", "roles must alternate; give a template that renders"),
        ("{{ messages[-1].content }}", "Turns", "leaves out the policy's messages; give a template"),
        ("{{ messages[-1].content }}", "Addition", ""),
        (chat_templates.PHI3, "Turns", ""),
        ("{% if %}", "Addition", "its chat template is not valid Jinja (line 1: "),
    ],
)
def test_a_template_that_cannot_join_the_turns_of_the_environment_is_refused_before_the_start(
    template: str, environment: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "rollout")
    folder = save_byte_tokenizer(tmp_path / "model")
    (folder / "config.json").write_text("{}")
    given = load("quickstart", ("start_model.steps=0", f"model={folder}", "serve.python=nowhere/bin/python"))
    chosen = {"chat_template": template, "environment": PlugIn(name=f"faulty_environments:{environment}")}
    # Of what is right, the next check fails: that for vLLM.
    with pytest.raises(ConfigError, match=re.escape(message) if message else "serve.python"):
        preflight(given.model_copy(update={"rollout": given.rollout.model_copy(update=chosen)}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"architectures": ["T5ForConditionalGeneration"]},
            "T5ForConditionalGeneration is not supported: only",
        ),
        (
            {"architectures": ["BertForMaskedLM"]},
            r"BertForMaskedLM is not supported: .* ForCausalLM or LMHead",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "quantization_config": {"quant_method": "fp8"}},
            r"weights are quantized \(fp8\) and cannot be trained; give the model in bfloat16",
        ),
        (
            {"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": {}},
            r"model type 'own' needs code of its folder \(auto_map\), which is never executed",
        ),
    ],
)
@pytest.mark.parametrize("field", ["model", "train.kl.model"])
def test_a_model_that_cannot_be_trained_is_refused_by_name(
    field: str, settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    chosen = {"model": ["start_model.steps=0"], "train.kl.model": ["train.kl.reference=frozen"]}[field]
    with pytest.raises(ConfigError, match=rf"{field} = '{tmp_path}': .*{message}"):
        preflight(load("quickstart", (f"{field}={tmp_path}", *chosen)))


def test_a_reference_model_by_its_name_on_the_hub_is_downloaded_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(field: str, model: str) -> None:
        if field == "train.kl.model":
            folder = tmp_path / "models" / model
            folder.mkdir(parents=True)
            (folder / "config.json").write_text('{"architectures": ["BertForMaskedLM"]}')

    settings = load("quickstart", ("train.kl.reference=frozen", "train.kl.model=Some-Org/reference"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rollmill.flows.checks.preflight.download_model", download)
    with pytest.raises(ConfigError, match=r"train\.kl\.model = .*BertForMaskedLM is not supported"):
        preflight(settings)


@pytest.mark.parametrize("content", ["", "[" * 100_000, '{"architectures": 3}'])
def test_a_model_with_a_damaged_config_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"its config\.json cannot be read .* copy or download"):
        preflight(load("quickstart", (f"model={tmp_path}", "start_model.steps=0")))


@pytest.mark.parametrize(
    "settings",
    [
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "auto_map": {}},
        {"model_type": "qwen2"},
    ],
)
def test_other_models_pass(settings: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    check_architecture("model", tmp_path)


@pytest.mark.parametrize(
    ("setting", "library", "extra"),
    [("tensorboard=true", "tensorboardX", "tensorboard"), ("mlflow_uri=http://h", "mlflow", "mlflow")],
)
def test_a_sink_without_its_library_is_refused_with_the_command_that_installs_it(
    setting: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=rf"needs {library}: pip install 'rollmill\[{extra}\]'"):
        preflight(load("quickstart", (f"observe.{setting}",)))


@pytest.mark.parametrize(("refills", "is_refused"), [(2, True), (3, False), (5, False)])
def test_a_fork_may_have_more_refills_than_its_source_and_not_fewer(
    tmp_path: Path, refills: int, is_refused: bool
) -> None:
    config = load(
        "quickstart",
        (f"store.root={tmp_path}", "model=m", "start_model.steps=0", "rollout.max_refill_groups=3"),
    )
    with open_run(tmp_path / "run", config.model_dump(mode="json")) as run:
        overrides = [f"rollout.max_refill_groups={refills}"]
        if is_refused:
            with pytest.raises(RunMismatchError, match="numbered for 3 refills a step; give at least 3"):
                fork_config(run.folder, overrides)
        else:
            assert fork_config(run.folder, overrides).rollout.max_refill_groups == refills


@pytest.mark.parametrize(("refills", "is_refused"), [(5, True), (6, False)])
def test_a_fork_with_fewer_environments_needs_as_many_numbers_for_refills(
    tmp_path: Path, refills: int, is_refused: bool
) -> None:
    given = (f"store.root={tmp_path}", "model=m", "start_model.steps=0", "rollout.max_refill_groups=2")
    overrides = [
        *("environments=[]", "rollout.environment=guess", "score.scorer=guess"),
        f"rollout.max_refill_groups={refills}",
    ]
    with open_run(tmp_path / "run", load("mixed", given).model_dump(mode="json")) as run:
        if is_refused:
            with pytest.raises(RunMismatchError, match="numbered for 6 refills a step; give at least 6"):
                fork_config(run.folder, overrides)
        else:
            assert fork_config(run.folder, overrides).rollout.max_refill_groups == refills


@pytest.mark.parametrize(
    ("section", "name", "value", "instead"),
    [("observe", "viewer_url", "x y", "http://h:1"), ("train", "command_timeout_s", 1e9, "60")],
)
def test_a_stored_setting_that_is_refused_today_is_named_with_the_override_that_replaces_it(
    tmp_path: Path, section: str, name: str, value: object, instead: str
) -> None:
    config = load("quickstart", (f"store.root={tmp_path}", "model=m", "start_model.steps=0")).model_dump(
        mode="json"
    )
    config[section][name] = value
    with open_run(tmp_path / "old", config) as run:
        calls = (
            partial(fork_config, run.folder),
            partial(evaluate_config, run.folder.location),
            partial(retrain_config, run.folder.location),
        )
        for call in calls:
            with pytest.raises(
                ConfigError,
                match=rf"run\.json has this value: replace it with --set {section}\.{name}=VALUE$",
            ) as refused:
                call(())
            assert refused.value.field == f"{section}.{name}"
            with pytest.raises(ConfigError) as wrong:
                call((f"{section}.{name}=[]",))
            assert "run.json" not in str(wrong.value)
        assert fork_config(run.folder, (f"{section}.{name}={instead}",)).steps == config["steps"]


def test_a_stored_setting_that_has_moved_is_refused_with_its_file(tmp_path: Path) -> None:
    with (
        open_run(tmp_path / "old", {"serve": {"api_key_env": "X_SECRET"}}) as run,
        pytest.raises(ConfigError, match=r"run\.json has this setting: change it there") as refused,
    ):
        fork_config(run.folder, ())
    assert refused.value.field == "serve.api_key_env"


@pytest.mark.parametrize("checkpoint", [None, 1, 2])
async def test_a_fork_with_another_reference_begins_at_a_checkpoint(
    tmp_path: Path, checkpoint: int | None
) -> None:
    config = load("quickstart", (f"store.root={tmp_path}", "model=m", "start_model.steps=0"))
    empty = make_batch("batches", {name: [] for name in dataset_schema("batches").names})
    with open_run(tmp_path / "run", config.model_dump(mode="json")) as run:
        async with run.writer as writer:
            for step in range(2):
                await writer.append("batches", empty, step=step)
        if checkpoint is not None:
            marker = {"run": run.manifest.run, "version": checkpoint, "digest": "d"}
            key = f"checkpoints/version={checkpoint:06d}/{CHECKPOINT_MARKER}"
            publish_text(run.files, key, json.dumps(marker).encode())
    folder, overrides = RunFolder(tmp_path / "run"), ("train.kl.reference=frozen", "train.lr=0.5")
    if checkpoint == 2:
        assert prepare_fork(folder, 2, "fork", overrides).train.kl.reference == "frozen"
        return
    first = checkpoint or 0
    message = rf"at step 2 trains on its steps from {first} on again, (?s:.*)train\.kl\.reference: .*\nfork it at step {first}"
    with pytest.raises(RunMismatchError, match=message):
        prepare_fork(folder, 2, "fork", overrides)
    # Logits of another precision give other gradients.
    with pytest.raises(RunMismatchError, match=r"train\.head_dtype: the run has 'float32', given is 'model'"):
        prepare_fork(folder, 2, "fork", ("train.head_dtype=model",))
    prepare_fork(folder, 2, "fork", ("train.lr=0.5",))
    (kept,) = read_manifest(RunFolder(tmp_path / "fork")).earlier_settings
    assert (kept.until_step, kept.settings["train.lr"]) == (2, config.train.lr)


def open_run(folder: Path, config: dict[str, Any]) -> OpenRun:
    return OpenRun.open(
        RunFolder(folder), config=config, fixed={}, versions={}, git_commit="", config_of=StoreConfig()
    )


def test_a_retrained_run_is_not_asked_how_many_rows_it_would_sample() -> None:
    settings = ("rollout.groups_per_step=1", "train.ranks=4", "train.updates_per_step=3")

    config = load("quickstart", (*settings, "retrain.sources=[elsewhere]"))

    assert config.trajectories_per_step < config.train.ranks * config.train.updates_per_step


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("serve.urls=[h:1]", "serve.urls.0 = 'h:1': write the address with its scheme"),
        ("train.url=h:1", "train.url = 'h:1': write the address with its scheme"),
        ("score.judge.url=ftp://x", "score.judge.url = 'ftp://x': write the address with its scheme"),
        ("train.kl=0.1", "train.kl = 0.1: this is a section"),
        ("train.betas=0.9", "train.betas = 0.9: give a list"),
        ("trian.lr=1", "there is no such setting; did you mean train?"),
        ("lr=1", "there is no such setting; did you mean train.lr?"),
        ("num_generations=1", "there is no such setting; it is rollout.group_size here"),
        ("beta=0.1", "beta = 0.1: there is no such setting; it is train.kl.coef here"),
        ("nothing_alike=1", "there is no such setting; `rollmill settings` lists all"),
    ],
)
def test_an_error_says_what_to_write_instead(override: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        load("quickstart", (override,))


def test_a_section_may_be_empty(tmp_path: Path) -> None:
    """All below `train:` may be commented out."""
    preset = tmp_path / "mine.yaml"
    preset.write_text("train:\nrollout:\n  prompts:\n")
    toy, joined = load("quickstart"), load(f"quickstart+{preset}")
    assert (joined.train, joined.rollout) == (toy.train, toy.rollout)
    assert load(f"quickstart+{preset}", ("train.lr=1e-5",)).train.lr == 1e-5
    assert parse_settings(RunConfig, {"train": None}) == RunConfig()
    assert parse_settings(RunConfig, apply_overrides({"train": None}, ["train.lr=1e-5"])).train.lr == 1e-5


def test_gpus_may_be_given_as_numbers() -> None:
    assert load("quickstart", ("serve.gpus=[0,1]",)).serve.gpus == ("0", "1")


LONGROPE = {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 4096}
# transformers reads it as longrope.
PHI_YARN = {"rope_scaling": {"type": "yarn", "long_factor": [4.0]}, "original_max_position_embeddings": 4096}
# Of two lengths transformers takes the model's.
TWO_LENGTHS = {
    "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 8192},
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize("settings", [LONGROPE, DYNAMIC, PHI_YARN, TWO_LENGTHS])
def test_a_position_encoding_that_changes_with_the_longest_row_is_refused_by_name(
    settings: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))

    check_rope("model", tmp_path, 4096)
    with pytest.raises(
        ConfigError, match=rf"model = '{tmp_path}': .* change at 4096 tokens.* is 4097: set it"
    ):
        check_rope("model", tmp_path, 4097)


def test_position_encodings_that_do_not_depend_on_the_longest_row_pass(tmp_path: Path) -> None:
    for rope in ({"rope_type": "llama3", "original_max_position_embeddings": 8}, {"type": "yarn"}, None):
        (tmp_path / "config.json").write_text(json.dumps({"rope_scaling": rope}))
        check_rope("model", tmp_path, 4096)


def test_a_config_json_of_wrong_types_is_refused(tmp_path: Path) -> None:
    for settings in ({"text_config": {"rope_scaling": "longrope"}}, {"rope_parameters": [1]}):
        (tmp_path / "config.json").write_text(json.dumps(settings))
        with pytest.raises(ConfigError, match=r"its config\.json cannot be read \(Expected `object"):
            check_rope("model", tmp_path, 1)


def test_a_position_encoding_without_a_length_is_refused(tmp_path: Path) -> None:
    settings = {"rope_scaling": {"type": "dynamic"}, "max_position_embeddings": None}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="change at 0 tokens"):
        check_rope("model", tmp_path, 1)


def test_the_start_model_is_checked_for_such_an_encoding(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["PhiForCausalLM"]} | LONGROPE))
    settings = (
        "start_model.steps=0",
        f"model={tmp_path}",
        "serve.max_model_len=4097",
        "train.micro_batch_tokens=4097",
    )
    with pytest.raises(ConfigError, match="change at 4096 tokens"):
        preflight(load("quickstart", settings))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#!/bin/sh\n", r"it is not a Python that runs \(JSONDecodeError\)"),
        ("#!/bin/sh\nexit 3\n", r"it is not a Python that runs \(CalledProcessError\)"),
        ("no program", r"it is not a Python that runs \(OSError\)"),
        (f'#!/bin/sh\nexec {sys.executable} "$@"\n', "this Python's environment has no vLLM"),
    ],
)
def test_another_program_for_vllms_python_is_refused(text: str, message: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(text)
    python.chmod(0o700)
    with pytest.raises(ConfigError, match=rf"serve\.python = '{python}': {message}"):
        preflight(load("quickstart", (f"serve.python={python}",)))


@pytest.mark.parametrize("python", ["/", "", "/dev/null", "setup.py"])
def test_what_is_no_program_is_refused_as_vllms_python(python: str) -> None:
    with pytest.raises(ConfigError, match=rf"serve\.python = '{python}': there is no Python; create"):
        preflight(load("quickstart", (f"serve.python={python}",)))


@pytest.mark.parametrize(
    ("override", "is_other"),
    [("steps=9", False), ("score.scorer=guess", True), ("evaluate.scorer=guess", True)],
)
def test_a_fork_whose_rewards_are_not_those_of_its_source_is_known(
    override: str, is_other: bool, tmp_path: Path
) -> None:
    given = (f"store.root={tmp_path}", "model=m", "start_model.steps=0")
    with open_run(tmp_path / "run", load("quickstart", given).model_dump(mode="json")) as run:
        assert new_runs._scores_otherwise(run.folder, load("quickstart", (*given, override))) == is_other


def test_a_fork_that_lacks_something_leaves_nothing(tmp_path: Path) -> None:
    settings = (f"store.root={tmp_path}", "model=nowhere", "start_model.steps=0")
    with open_run(tmp_path / "run", load("quickstart", settings).model_dump(mode="json")) as run:
        folder = run.folder
    with pytest.raises(ConfigError, match="model = 'nowhere': not a model folder"):
        fork_here(folder, 1, "forked", ())
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "setting",
    [
        "start_timeout_s=1e30",
        "rollout.env_timeout_s=1e9",
        "rollout.trajectory_timeout_s=1e9",
        "score.timeout_s=1e9",
        "serve.request_timeout_s=1e9",
        "sync.timeout_s=1e30",
        "sync.stall_timeout_s=1e9",
        "train.command_timeout_s=1e308",
        "train.lr=2",
        "train.threads=100000",
        "train.ranks=100000",
        "train.lora.rank=100000",
        "rollout.env_workers=100000",
        "score.workers=100000",
        "serve.servers=100000",
    ],
)
def test_numbers_that_nothing_can_have_are_refused(setting: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{re.escape(setting.partition('=')[0])} = .*less than or equal to"
    ):
        load("quickstart", (setting,))


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        (("train.lr=0",), "train.lr = 0.0: no weight changes"),
        (
            ("rollout.max_staleness=1000",),
            "rollout.max_staleness = 1000: trajectories more than 32 policy versions old",
        ),
        (("train.warmup_steps=1000000",), "train.warmup_steps = 1000000: the run has 40 updates"),
        (("checkpoint.every=1000000",), "checkpoint.every = 1000000: the run has 40 steps"),
        (
            ("train.lr_decay=linear", "train.lr_decay_updates=20"),
            "train.lr_decay_updates = 20: the run has 40 updates, and the learning rate is 0 after that many",
        ),
        (
            (
                "train.loss=gspo",
                "train.normalization=sequence",
                "train.clip_low=0.1",
                "train.clip_high=0.1",
            ),
            "train.clip_high = 0.1: gspo clips the ratio of a whole answer",
        ),
        (
            ("train.kl.reference=frozen", "train.kl.estimator=k1", "train.kl.coef=0.01"),
            "train.kl.estimator = 'k1': the gradient of k1 in the loss has mean 0",
        ),
    ],
)
def test_settings_that_are_rarely_meant_are_one_line_of_warning(
    settings: tuple[str, ...], warning: str
) -> None:
    (line,) = list_warnings(load("quickstart", settings))
    assert line.startswith(warning)


@pytest.mark.parametrize("preset", [each.stem for each in Path("conf").glob("*.yaml")])
def test_no_preset_has_a_warning(preset: str) -> None:
    assert list_warnings(load(preset)) == []


@pytest.mark.parametrize(
    ("settings", "coefficient", "warns"),
    [
        ({"output_router_logits": True, "router_aux_loss_coef": 0.5}, 0.0, True),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.5}, 0.01, False),
        ({"output_router_logits": False, "router_aux_loss_coef": 0.5}, 0.0, False),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.0}, 0.0, False),
        ({"output_router_logits": True, "aux_loss_coef": 0.5}, 0.0, True),
        ({"output_router_logits": True, "ffn_config": {"moe_loss_weight": 0.5}}, 0.0, True),
        ({"text_config": {"output_router_logits": True, "router_aux_loss_coef": 0.5}}, 0.0, True),
        ({"text_config": "x", "ffn_config": [1]}, 0.0, False),
        ({}, 0.0, False),
    ],
)
def test_a_model_that_asks_for_a_load_balancing_loss_is_warned_about(
    settings: dict[str, Any], coefficient: float, warns: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    warning = describe_missing_loss(tmp_path, TrainConfig(router_aux_loss_coef=coefficient))
    assert ("with coefficient 0.5: set train.router_aux_loss_coef" in warning) == bool(warning) == warns


def test_a_load_balancing_loss_without_a_coefficient_is_warned_about(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"output_router_logits": true}')
    assert "loss of experts: set train.router_aux_loss_coef" in describe_missing_loss(tmp_path, TrainConfig())


@pytest.mark.skipif(bool(read_gpus()), reason="this machine has a GPU")
@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_a_transport_between_gpus_is_refused_without_any(transport: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"sync\.transport = '{transport}': .* this machine has none; give auto"
    ):
        preflight(load("quickstart", (f"sync.transport={transport}",)))


@pytest.mark.parametrize("visible", ["0", "0,1"])
def test_what_trains_first_and_samples_then_needs_gpus_for_one_at_a_time(
    visible: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(gpu_assignment, "is_cpu_build", lambda _: False)
    for needs in ("check_vllm", "_check_trainer", "read_gpus", "check_gpus"):
        monkeypatch.setattr(preflight_module, needs, lambda *_, **__: None)
    words = (f"store.root={tmp_path}", "serve.servers=1", "train.ranks=1", "serve.share_gpus=false")
    config = load("quickstart", words)
    config = config.model_copy(update={"serve": config.serve.model_copy(update={"urls": ("http://h:1",)})})
    preflight_in_turn(config)
    launched = config.model_copy(update={"serve": config.serve.model_copy(update={"urls": ()})})
    if visible == "0":
        with pytest.raises(ConfigError, match="GPU"):
            preflight(launched)
    else:
        preflight(launched)


def test_an_evaluation_of_which_nothing_is_missing_needs_no_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stored_runs, "run_flow", lambda _: None)
    save_byte_tokenizer(tmp_path / "model")
    (tmp_path / "model/config.json").write_text(
        '{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}'
    )
    run = RunFolder(tmp_path / "run")
    begin_run(run, tmp_path / "model", 2, 1, start_model={"steps": 0})
    name, config = evaluate_config(run.location, ("serve.python=nowhere",))
    with pytest.raises(ConfigError, match=r"serve\.python = 'nowhere'"):
        evaluate_here(name, config, 0)
    store_evaluation(run, Rewards(np.ones(2), np.ones((2, 1))), version=0)
    evaluate_here(name, config, 0)


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("--step", {"step": 0}),
        ("--synthetic-traffic", {"traffic": 2}),
        ("--trainer", {"trainer": "none"}),
        ("--json", {"as_json": True}),
    ],
)
def test_an_option_of_attribution_is_refused_without_it(option: str, given: dict[str, Any]) -> None:
    usual = {
        "attribute": False,
        "step": None,
        "versions": (None, None),
        "traffic": 0,
        "trainer": "launch",
        "as_json": False,
    }
    check_replay_options(**usual)
    with pytest.raises(ConfigError, match=f"{option} = .*: it needs --attribute"):
        check_replay_options(**usual | given)
