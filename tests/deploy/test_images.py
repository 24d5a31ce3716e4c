"""The images: what the Dockerfile says, and what compose and Kubernetes start in them."""

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import KUBERNETES, ROOT, compose, dockerfile, entrypoint, manifest

from rollmill.flows.configuration.settings import load
from rollmill.tasks.serve import vllm_launch
from tests.stubs.prefect_cluster import settings_of

A_PORT = 8700


def lint(content: str) -> str:
    """Return hadolint's findings for a Dockerfile; empty without one."""
    hadolint = Path(sys.executable).parent / "hadolint"
    command = [hadolint, "--failure-threshold", "info", "-"]
    checked = subprocess.run(command, input=content, capture_output=True, text=True)
    assert bool(checked.stdout) == bool(checked.returncode)
    return checked.stdout


def test_dockerfile_is_as_hadolint_wants_it() -> None:
    assert lint((ROOT / "Dockerfile").read_text()) == ""


@pytest.mark.parametrize(
    "line", ["COPPY . .", "RUN cd /tmp && ls", "FROM debian", "EXPOSE 99999", "CMD ls -l"]
)
def test_a_wrong_line_of_the_dockerfile_is_found(line: str) -> None:
    assert lint((ROOT / "Dockerfile").read_text() + f"\n{line}\n")


def test_images_are_those_that_compose_and_kubernetes_name() -> None:
    built = {
        each["build"]["target"]: each["image"] for each in compose()["services"].values() if "build" in each
    }
    assert built == {target: f"rollmill-{target}" for target in ("server", "worker", "vllm")}
    assert built.keys() <= dockerfile().keys()
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    assert {each["name"] for each in kustomization["images"]} == set(built.values())
    assert (
        json.loads((KUBERNETES / "pool.json").read_text())["variables"]["properties"]["image"]["default"]
        in built.values()
    )


def test_an_image_takes_a_work_pools_command_as_its_program() -> None:
    # Docker's and Kubernetes' pools give the command of a flow run as arguments of the entrypoint.
    assert entrypoint("base") == ["tini", "--"]
    for target in ("server", "worker"):
        assert not [word for word, _ in dockerfile()[target] if word == "ENTRYPOINT"]


@pytest.mark.parametrize("target", ["server", "worker", "vllm"])
def test_an_image_runs_as_a_user_whose_number_is_known(target: str) -> None:
    assert [rest for word, rest in dockerfile()[target] if word == "USER"][-1:] == ["1000"]


def test_what_the_dockerfile_copies_is_there_and_sent_to_the_builder() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = [rest.split()[:-1] for stage in dockerfile().values() for word, rest in stage if word == "COPY"]
    names = [name for names in copied for name in names]
    assert len(names) > 6
    for name in names:
        assert list(ROOT.glob(name)), name
        assert not any(Path(name).match(pattern) for pattern in ignored), name


def test_a_users_project_is_found_in_the_workers_image_after_the_standard_library(tmp_path: Path) -> None:
    (run,) = [rest for word, rest in dockerfile()["worker"] if word == "RUN" and ".pth" in rest]
    venv.create(tmp_path / "environment", symlinks=True)
    programs = tmp_path / "environment" / "bin"
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONSAFEPATH": "1"}
    subprocess.run(["sh", "-euc", run], cwd=tmp_path, env=environment, check=True)
    project = tmp_path / "project"
    for name in ("digits", "queue"):
        (project / f"{name}.py").touch()
    code = "import digits, queue; print(digits.__file__, queue.__file__, sep='\\n')"
    shown = subprocess.check_output([programs / "python", "-c", code], cwd="/", env=environment, text=True)
    digits, queue = map(Path, shown.splitlines())
    assert digits == project / "digits.py"
    assert queue.parent != project


def test_what_is_secret_or_large_is_not_sent_to_the_builder() -> None:
    assert {".env", ".git", "runs", "models"} <= set((ROOT / ".dockerignore").read_text().split())


def test_the_workers_extra_and_the_vllm_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    runs = {
        target: " ".join(rest for word, rest in stage if word == "RUN")
        for target, stage in dockerfile().items()
    }
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", runs["worker"])
    assert set(extras.split(",")) == {"trainer", "s3", "cluster"}
    assert set(extras.split(",")) <= project.keys()
    for kind in ("vllm-cpu", "vllm-cuda"):
        line = re.search(rf'^{kind} = \["(.*)"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        assert line is not None
        assert project[kind] == [line[1]]


@pytest.mark.parametrize("machine", [pytest.param("laptop", marks=pytest.mark.slow), "gpu"])
def test_vllm_in_compose_is_started_as_the_command_starts_it(machine: str) -> None:
    settings = settings_of(ROOT / "deploy" / f"{machine}.env")
    config = load(settings["ROLLMILL_PRESET"]).serve.model_copy(update={"python": python_of(machine)})
    check_same_start(config, settings["ROLLMILL_MODEL"], settings["ROLLMILL_VLLM_ARGUMENTS"].split(), machine)


def test_vllm_in_kubernetes_is_started_as_the_command_starts_it() -> None:
    preset = settings_of(KUBERNETES / "run.env")["ROLLMILL_PRESET"]
    (container,) = manifest("StatefulSet", "vllm")["spec"]["template"]["spec"]["containers"]
    words = [word for each in container["args"] for word in each.split("=", 1)]
    model = words[words.index("--model") + 1]
    ours = [word for word in words if word not in ("--host", "0.0.0.0", "--model", model)]
    config = load(preset).serve.model_copy(update={"python": python_of("gpu")})
    check_same_start(config, model, ours, "gpu")
    assert Path(load(preset).model).name == Path(model).name


def python_of(machine: str) -> str:
    """Of an environment with the CPU build where there is one; else of one that does not exist."""
    return str(ROOT / ".venv-vllm/bin/python") if machine == "laptop" else "/nowhere/bin/python"


def check_same_start(config: Any, model: str, ours: list[str], machine: str) -> None:
    """The image's words and the manifest's ours are those of `rollmill vllm`, but for where the server listens."""
    if machine == "laptop" and not vllm_launch.is_cpu_build(config.python):
        pytest.skip("vLLM's CPU build is not here")
    theirs = vllm_launch.vllm_command(config, model, A_PORT)[3:]
    if theirs.count("--max-num-seqs") == 2:  # the preset's, which comes later, holds
        first = theirs.index("--max-num-seqs")
        del theirs[first : first + 2]
    if machine == "gpu":  # a server that has a GPU for itself uses more of it
        theirs[theirs.index("--gpu-memory-utilization") + 1] = "0.85"
    for option, value in (("--host", "127.0.0.1"), ("--port", str(A_PORT)), ("--model", model)):
        at = theirs.index(option)
        assert theirs[at : at + 2] == [option, value]
        del theirs[at : at + 2]
    image = entrypoint("vllm")
    words = image[image.index("--port") + 2 :]
    assert sorted([*words, *ours]) == sorted(theirs)
