"""A run that its GPUs cannot carry is refused before it starts, with the settings that would fit; nvidia-smi is a stand-in."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmill.flows.checks.gpu_memory import check_gpus, find_excess, plan_needs
from rollmill.flows.checks.memory_report import imagine_gpus
from rollmill.flows.configuration.config import RunConfig
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.processes.gpus import GpuAssignment, list_visible_gpus, read_gpus
from rollmill.tasks.train.engine.memory_plan import MODELS

SIZES = MODELS["Qwen2.5-1.5B"]
SHARED = GpuAssignment("0", ("0",))
H100 = "{number}, GPU-{number}b0c, NVIDIA H100 80GB HBM3, 81559, {used}, {driver}"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts an nvidia-smi first on PATH that prints the given lines."""

    def install(*lines: str, status: int = 0) -> None:
        program = tmp_path / "nvidia-smi"
        text = "\n".join(lines)
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {status}\n")
        program.chmod(0o700)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return install


def settings(**train: object) -> RunConfig:
    values = {"dtype": "bfloat16", "micro_batch_tokens": 16384, "gradient_checkpointing": False} | train
    serve = {"gpu_memory_utilization": 0.4, "max_model_len": 1280}
    return RunConfig.model_validate({"train": values, "serve": serve})


def test_a_machine_without_a_gpu_has_none(machine) -> None:
    machine("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", status=9)
    assert read_gpus() == ()
    assert list_visible_gpus() == ()


def test_a_gpu_whose_driver_does_not_answer_ends_the_start(machine, tmp_path: Path) -> None:
    machine("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", status=9)
    (tmp_path / "nvidia0").touch()
    with pytest.raises(
        ConfigError, match=r"NVIDIA-SMI has failed.*there is a GPU, and its driver does not answer"
    ):
        read_gpus({}, devices=tmp_path)
    assert read_gpus({"CUDA_VISIBLE_DEVICES": ""}, devices=tmp_path) == ()


def test_eight_gpus_are_read_and_visible(machine) -> None:
    machine(*(H100.format(number=number, used=4, driver="580.65.06") for number in range(8)))
    assert list_visible_gpus() == tuple(map(str, range(8)))
    last = read_gpus()[-1]
    assert (last.uuid, last.total_bytes >> 20, last.used_bytes >> 20) == ("GPU-7b0c", 81559, 4)


def test_an_old_driver_ends_the_start(machine) -> None:
    machine(H100.format(number=0, used=4, driver="550.54.15"))
    with pytest.raises(
        ConfigError, match=r"NVIDIA driver = '550\.54\.15': CUDA 13 needs version 580 or newer"
    ):
        check_gpus(settings(), SHARED, read_gpus())


def test_a_torch_without_cuda_on_a_machine_with_a_gpu_ends_the_start(machine) -> None:
    machine(H100.format(number=0, used=4, driver="580.65.06"))
    with pytest.raises(ConfigError, match=r"torch = '.*\+cpu': this is the CPU build, and there is a GPU"):
        check_gpus(settings(), SHARED, read_gpus())
    check_gpus(settings(), GpuAssignment("", ("",)), read_gpus())


def test_what_does_not_fit_is_said_with_the_settings_that_fit(machine) -> None:
    machine(H100.format(number=0, used=4, driver="580.65.06"))
    (gpu,) = read_gpus()
    text = find_excess(settings(), SIZES, SHARED, gpu)
    assert (
        "GPU 0 (NVIDIA H100 80GB HBM3) has 79.6 GiB free; a trainer rank needs 76.8 and vLLM needs 31.9"
        in text
    )
    assert "it fits with train.gradient_checkpointing=true (then a trainer rank needs 34.2 and" in text
    assert find_excess(settings(gradient_checkpointing=True), SIZES, SHARED, gpu) == ""


def test_a_busy_gpu_has_less(machine) -> None:
    machine(H100.format(number=0, used=40000, driver="580.65.06"))
    (gpu,) = read_gpus()
    text = find_excess(settings(gradient_checkpointing=True), SIZES, SHARED, gpu)
    assert "has 40.6 of 79.6 GiB free" in text
    assert "it fits with train.micro_batch_tokens=4096 and train.offload=optimizer (then" in text


def test_the_servers_share_is_lowered_to_what_the_trainer_leaves(machine) -> None:
    machine(H100.format(number=0, used=0, driver="580.65.06"))
    (gpu,) = read_gpus()
    config = settings(gradient_checkpointing=True, micro_batch_tokens=1280)
    config = config.model_copy(
        update={"serve": config.serve.model_copy(update={"gpu_memory_utilization": 0.9})}
    )
    text = find_excess(config, SIZES, SHARED, gpu)
    (share,) = [float(word.split("=")[1]) for word in text.split() if word.startswith("serve.gpu_memory")]
    serve = config.serve.model_copy(update={"gpu_memory_utilization": share})
    changed = config.model_copy(update={"serve": serve})
    assert find_excess(changed, SIZES, SHARED, gpu) == ""
    assert sum(plan_needs(changed, SIZES, SHARED, gpu).values()) > 0.98 * gpu.total_bytes


def test_separate_gpus_are_compared_each_with_its_own_process() -> None:
    config = settings(gradient_checkpointing=True, ranks=2)
    gpus = imagine_gpus(config, 80)
    assert len(gpus) == 3
    assigned = GpuAssignment("0,1", ("2",))
    assert [list(plan_needs(config, SIZES, assigned, gpu)) for gpu in gpus] == [
        ["a trainer rank"],
        ["a trainer rank"],
        ["vLLM"],
    ]


def test_a_model_that_no_setting_makes_fit_is_said() -> None:
    config = settings(gradient_checkpointing=True)
    (gpu,) = imagine_gpus(
        config.model_copy(update={"serve": config.serve.model_copy(update={"share_gpus": True})}), 24
    )
    assert "no setting alone makes it fit" in find_excess(config, MODELS["Llama-3.1-70B"], SHARED, gpu)
