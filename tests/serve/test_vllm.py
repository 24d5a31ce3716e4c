"""How a server is launched, for what its environment holds."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollmill.tasks.errors import RequestError
from rollmill.tasks.serve import vllm_launch
from rollmill.tasks.serve.config import ServeConfig
from rollmill.tasks.serve.policy_version import PolicyVersion


@pytest.fixture
def config_of(tmp_path: Path):
    def config(distribution: str, **settings: object) -> ServeConfig:
        (tmp_path / "lib/python3.11/site-packages" / f"{distribution}-0.32.0.dist-info").mkdir(parents=True)
        return ServeConfig(python=str(tmp_path / "bin/python"), **settings)

    return config


def test_the_cpu_build_computes_eagerly_in_the_engines_process(config_of) -> None:
    words = vllm_launch.vllm_command(config_of("vllm_cpu"), "model", 80)
    assert "--enforce-eager" in words
    assert any("UniProcExecutor" in word for word in words)


def test_the_gpu_build_keeps_the_defaults_of_vllm(config_of) -> None:
    config = config_of("vllm")
    assert "--enforce-eager" not in vllm_launch.vllm_command(config, "model", 80)
    assert "TORCHDYNAMO_DISABLE" not in vllm_launch.vllm_environment(config, base={})


def test_a_plugin_that_vllm_could_not_load_is_found_in_its_log() -> None:
    log = "INFO starting\nERROR 07-01 [__init__.py:80] Failed to load plugin rollmill\nTraceback: ..."
    assert vllm_launch.has_plugin_failure(log)
    assert vllm_launch.has_plugin_failure("ValueError: Invalid weight transfer backend: rollmill. Available")
    assert not vllm_launch.has_plugin_failure("ERROR Failed to load plugin another")


def test_the_working_folder_is_not_on_a_servers_path_nor_on_that_of_what_it_starts(
    config_of, tmp_path: Path
) -> None:
    (tmp_path / "queue.py").write_text("raise ImportError(__file__)")
    environment = vllm_launch.vllm_environment(config_of("vllm"), base={"PYTHONSAFEPATH": ""})
    start = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'queue'], check=True)"
    for words in (["-m", "queue"], ["-c", start]):
        subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, check=True)


def test_more_arguments_come_last_so_that_they_win(config_of) -> None:
    config = config_of("vllm", extra_args=("--max-num-seqs", "7"))
    assert vllm_launch.vllm_command(config, "model", 80)[-2:] == ["--max-num-seqs", "7"]


@pytest.mark.parametrize(
    ("dtype", "head_dtype", "overrides"),
    [("bfloat16", "float32", True), ("bfloat16", "model", False), ("float32", "float32", False)],
)
def test_a_bfloat16_server_computes_logits_in_float32_by_default(
    config_of, dtype: str, head_dtype: str, overrides: bool
) -> None:
    words = vllm_launch.vllm_command(config_of("vllm", dtype=dtype), "model", 80, head_dtype=head_dtype)
    assert ("--hf-overrides.head_dtype" in words) == overrides


def test_a_server_knows_nothing_of_prefect_or_of_our_python(config_of) -> None:
    base = {"PREFECT_API_KEY": "secret", "PYTHONPATH": "here", "HOME": "/", "PATH": "bin"}
    environment = vllm_launch.vllm_environment(config_of("vllm"), base=base)
    assert not {"PREFECT_API_KEY", "PYTHONPATH"} & set(environment)
    assert environment["HOME"] == "/"


def test_a_server_asks_for_the_key_that_the_client_sends(config_of) -> None:
    config = config_of("vllm")
    assert vllm_launch.vllm_environment(config, base={vllm_launch.API_KEY_ENV: "k"})["VLLM_API_KEY"] == "k"
    assert "VLLM_API_KEY" not in vllm_launch.vllm_environment(config, base={})


def test_a_server_sees_the_gpus_that_it_was_assigned_and_else_those_that_we_see(config_of) -> None:
    config, ours = config_of("vllm"), {"CUDA_VISIBLE_DEVICES": "5"}
    assert vllm_launch.vllm_environment(config, ours, gpus="2,3")["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert vllm_launch.vllm_environment(config, ours)["CUDA_VISIBLE_DEVICES"] == "5"
    assert "CUDA_VISIBLE_DEVICES" not in vllm_launch.vllm_environment(config, {})


@pytest.mark.parametrize(
    ("arguments", "n"),
    [
        ((), 1),
        (("--tensor-parallel-size", "4"), 4),
        (("--tensor_parallel_size=2", "-pp", "2"), 4),
        (("-tp", "8", "--max-num-seqs", "512"), 8),
        (("--tensor-parallel", "2", "--pipeline=3"), 6),
        (("--prefill-context-parallel-size", "2", "-tp", "2"), 4),
        (("--", "2"), 1),
    ],
)
def test_a_server_computes_with_as_many_gpus_as_its_arguments_say(
    config_of, arguments: tuple[str, ...], n: int
) -> None:
    assert vllm_launch.gpus_per_server(config_of("vllm", extra_args=arguments)) == n


def test_a_version_is_read_as_it_was_written() -> None:
    version = PolicyVersion("9f2c", 1, 12)
    assert str(version) == "9f2c:1:12"
    assert PolicyVersion.parse(str(version)) == version


@pytest.mark.parametrize("text", ["default", "", "run:1", "run:1:x", "run:1:-2", "a:b:1:2"])
def test_a_text_that_is_no_policy_version_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="expected run:incarnation:version"):
        PolicyVersion.parse(text)


def test_rollmills_plugin_is_added_to_those_that_a_user_names(config_of) -> None:
    config = config_of("vllm")
    assert vllm_launch.vllm_environment(config, base={})["VLLM_PLUGINS"] == "rollmill"
    assert (
        vllm_launch.vllm_environment(config, base={"VLLM_PLUGINS": "mine"})["VLLM_PLUGINS"] == "mine,rollmill"
    )


def test_a_server_renders_with_the_runs_template_and_its_arguments(config_of) -> None:
    config, arguments = config_of("vllm"), {"chat_template": "my.jinja", "chat_template_kwargs": '{"a": 1}'}
    words = vllm_launch.vllm_command(config, "model", 80, **arguments)
    assert words[-4:] == ["--chat-template", "my.jinja", "--default-chat-template-kwargs", '{"a": 1}']
    assert not any("template" in word for word in vllm_launch.vllm_command(config, "model", 80))


def test_a_server_returns_routed_experts_when_they_are_kept(config_of) -> None:
    config = config_of("vllm")
    words = [vllm_launch.vllm_command(config, "model", 80, returns_routing=each) for each in (True, False)]
    assert [vllm_launch.ROUTING_ARGUMENT in each for each in words] == [True, False]
