"""What `pip install rollmill` brings without extras looks at stored runs, and names the extra that anything else needs."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmill.tasks.store.folders import RunFolder

DISTRIBUTIONS_ENV = "ROLLMILL_DISTRIBUTIONS"
ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).parent / "uv"
LARGEST_BASE_BYTES = 700_000_000
"""Of the environment's files, without what Python compiles."""

pytestmark = pytest.mark.slow
Installed = Callable[..., subprocess.CompletedProcess[str]]


def install_base(folder: Path, distribution: Path, python: str) -> Path:
    """Install a distribution without extras into a new environment; returns the environment's folder."""
    environment = folder / "environment"
    subprocess.run([UV, "venv", "--quiet", "--python", python, environment], check=True)
    constraints = ["--constraint", ROOT / "constraints.txt"]
    subprocess.run(
        [UV, "pip", "install", "--quiet", "--python", environment, *constraints, distribution], check=True
    )
    return environment


# `make release` tests both of what it has built.
@pytest.fixture(scope="module", params=["wheel", "sdist"] if DISTRIBUTIONS_ENV in os.environ else ["wheel"])
def base(
    request: pytest.FixtureRequest,
    distributions: dict[str, Path],
    small_run: RunFolder,
    tmp_path_factory: pytest.TempPathFactory,
) -> Installed:
    """Run a command of an environment that has the base alone, in the folder that holds runs/."""
    environment = install_base(tmp_path_factory.mktemp("base"), distributions[request.param], sys.executable)

    def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [environment / "bin" / program, *words],
            cwd=small_run.local.parent.parent,
            env=os.environ | {"PATH": f"{UV.parent}:{os.environ['PATH']}", "COLUMNS": "200"},
            capture_output=True,
            check=False,
            text=True,
        )

    return run


def test_the_base_looks_at_a_stored_run(base: Installed, tmp_path: Path) -> None:
    for words, expected in (
        (["inspect", "small"], "3 steps trained"),
        (["list"], "small"),
        (["show", "small", "0.1", "--tokens"], "position"),
        (["sql", "small", "select count(*) as n from trajectories"], "48"),
        (["export", "small", "--to", "parquet", "--output", str(tmp_path / "parquet")], "rollouts.parquet"),
        (["verify", "small"], "small"),
        (["history"], "none yet"),
    ):
        done = base("rollmill", *words)
        assert not done.stderr
        assert expected in done.stdout, words


def test_the_base_reads_the_texts_of_tokens(base: Installed) -> None:
    shown = json.loads(base("rollmill", "show", "small", "0.1", "--tokens", "--json").stdout)
    assert "".join(each["text"] for each in shown["tokens"]).endswith("<eos>")


def test_the_base_has_the_viewer(base: Installed) -> None:
    done = base("python", "-c", "from rollmill.tasks.look.web.app import serve_viewer")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["up"], "flow"),
        (["doctor"], "flow"),
        (["rescore", "small", "--scorer", "exact"], "flow"),
        (["plot", "small"], "plot"),
        (["mcp"], "mcp"),
        (["inspect", "s3://bucket/run"], "s3"),
        (["publish", "small", "--to", "delta:tables"], "publish"),
        (["spans", "small", "--otlp", "http://127.0.0.1:1"], "otel"),
    ],
)
def test_a_command_that_needs_an_extra_names_it_in_one_line(
    base: Installed, words: list[str], extra: str
) -> None:
    done = base("rollmill", *words)
    assert done.returncode in (1, 2)
    assert done.stderr.count("\n") == 1
    assert f"pip install 'rollmill[{extra}]'" in done.stderr


def test_the_base_has_no_large_library_that_it_does_not_need(base: Installed) -> None:
    script = "import sysconfig, pathlib; files = pathlib.Path(sysconfig.get_path('purelib'))\n"
    script += "print(sum(each.lstat().st_size for each in files.rglob('*') if each.is_file()))\n"
    script += "print(*sorted(each.name for each in files.iterdir()))"
    n_bytes, names = base("python", "-c", script).stdout.splitlines()
    assert not {"torch", "prefect", "transformers", "botocore", "matplotlib"} & set(names.split())
    assert int(n_bytes) < LARGEST_BASE_BYTES


def test_setup_makes_the_environment_with_vllm_and_the_same_rollmill(base: Installed, tmp_path: Path) -> None:
    folder = tmp_path / "vllm"
    done = base("rollmill", "setup", str(folder))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"{folder}/bin/python is ready")
    assert "+ vllm" in done.stderr
    script = "import rollmill, importlib.metadata as found; print(rollmill.__file__)\n"
    script += "print(found.entry_points(group='vllm.general_plugins', name='rollmill')['rollmill'].value)"
    shown = subprocess.run(
        [folder / "bin" / "python", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        check=True,
        text=True,
    )
    package, plugin = shown.stdout.splitlines()
    assert Path(package).is_relative_to(folder)
    assert plugin == "rollmill.tasks.sync.vllm_plugin.plugin:register"


def test_setup_refuses_a_build_that_there_is_not(base: Installed, tmp_path: Path) -> None:
    done = base("rollmill", "setup", str(tmp_path / "vllm"), "--build", "rocm")
    assert (done.returncode, done.stderr) == (
        2,
        "rollmill: --build = 'rocm': give cpu or cuda, or leave it out\n",
    )
    assert not (tmp_path / "vllm").exists()


def find_python(version: str) -> str | None:
    """A Python of this version on this machine, pyenv's too."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for python in (shutil.which(f"python{version}"), *versions.glob(f"{version}.*/bin/python")):
        # A shim of pyenv fails if its version is not chosen.
        if python and subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return str(python)
    return None


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_the_base_looks_at_a_stored_run_with_other_versions_of_python(
    distributions: dict[str, Path], small_run: RunFolder, tmp_path: Path, version: str
) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"Python {version} is not installed")
    environment = install_base(tmp_path, distributions["wheel"], python)
    for words in (["inspect", small_run.location], ["sql", small_run.location, "select 1"]):
        done = subprocess.run(
            [environment / "bin" / "rollmill", *words],
            cwd=tmp_path,
            capture_output=True,
            check=False,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("version", ["3.11", "3.13"])
def test_the_base_has_wheels_for_macos(version: str) -> None:
    options = [
        "--only-binary",
        ":all:",
        "--python-platform",
        "aarch64-apple-darwin",
        "--python-version",
        version,
    ]
    command = [UV, "pip", "compile", "--quiet", *options, "--constraint", "constraints.txt", "pyproject.toml"]
    resolved = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, text=True)
    assert resolved.returncode == 0, resolved.stderr
    assert "pyarrow==" in resolved.stdout
