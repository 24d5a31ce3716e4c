"""Install packages into an environment with uv, within constraints; imports the standard library only.

`make` runs it as a module, before anything else is installed. uv reads neither the find-links of pip nor the CPU build of torch
from the index: both are passed on to it here.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rollmill.tasks.errors import ConfigError, ServiceError


def install(
    python: Path,
    constraints: Path | None,
    packages: Sequence[str],
    absent: Sequence[str] = (),
    *,
    build: str = "",
    quiet: bool = False,
) -> None:
    """Install packages; uv prints its progress on standard error.

    Args:
        python: interpreter of the environment, or its folder.
        constraints: file with pinned versions; None: none.
        packages: requirements, and options of `uv pip install`.
        absent: packages that are left out although others require them.
        build: of torch, cpu or cuda; empty: cuda on a machine with an NVIDIA GPU, otherwise cpu.
        quiet: print only errors.

    Raises:
        ServiceError: uv failed; its output has the reason.
        ConfigError: there is no uv.
    """
    options: list[str] = ["--quiet"] if quiet else []
    with tempfile.TemporaryDirectory() as scratch:
        if absent:
            override = Path(scratch) / "absent.txt"
            override.write_text("".join(f'{each} ; sys_platform == "never"\n' for each in absent))
            options += ["--override", str(override)]
        if constraints:
            options += ["--constraint", str(constraints), *_torch_options(constraints, build)]
        run_uv("pip", "install", "--python", str(python), *options, *packages)


def run_uv(*words: str) -> None:
    """Run a command of uv; raises ServiceError if it fails."""
    done = subprocess.run([find_uv(), *words], env=_environment(), check=False)
    if done.returncode:
        raise ServiceError("uv", f"`uv {' '.join(words[:2])}` ended with exit status {done.returncode}")


def find_uv() -> str:
    """Return the path of uv, that of this Python's environment first; ConfigError without one."""
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if found is None:
        raise ConfigError("uv", "", "it makes environments: pip install 'rollmill[flow]'")
    return found


def has_gpu() -> bool:
    """Return True if this machine has an NVIDIA GPU, for which CUDA builds are installed."""
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, check=False)
    except OSError:
        return False
    return listed.returncode == 0 and bool(listed.stdout.strip())


def _environment() -> dict[str, str]:
    links = os.environ.get("UV_FIND_LINKS") or _pip_find_links()
    return dict(os.environ) | ({"UV_FIND_LINKS": links} if links else {})


def _pip_find_links() -> str:
    """Return pip's find-links, from its variable or its files, separated by commas; empty without pip."""
    pip = Path(sys.prefix) / "bin" / "pip"
    if not pip.is_file():
        return os.environ.get("PIP_FIND_LINKS", "").replace(" ", ",")
    listed = subprocess.run([pip, "config", "list"], capture_output=True, check=False, text=True).stdout
    found = re.search(r"^[^=\n]*find-links='(.*)'$", listed, re.MULTILINE)
    return ",".join(found[1].replace("\\n", " ").split()) if found else ""


def _torch_options(constraints: Path, build: str) -> list[str]:
    """Return the option for torch's CPU build, unless the CUDA build is wanted, or the find-links have the other."""
    pins = [line for line in constraints.read_text().splitlines() if line.startswith("torch==")]
    if not pins or (build or ("cuda" if has_gpu() else "cpu")) == "cuda":
        return []
    compiled = subprocess.run(
        [find_uv(), "pip", "compile", "--quiet", "--no-deps", "--no-annotate", "--no-header", "-"],
        input="\n".join(pins),
        env=_environment(),
        capture_output=True,
        check=False,
        text=True,
    )
    return [] if compiled.stdout.strip().endswith("+cpu") else ["--torch-backend", "cpu"]


def main() -> None:
    """Install what the command line names: `--python ENVIRONMENT --constraints FILE [--absent NAME]... PACKAGE...`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--constraints", type=Path, required=True)
    parser.add_argument("--absent", action="append", default=[])
    words, packages = parser.parse_known_args()
    try:
        install(words.python, words.constraints, packages, words.absent, quiet=True)
    except (ConfigError, ServiceError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
