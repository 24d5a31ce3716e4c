"""A wheel of this checkout, used in a folder whose own modules have the names of others."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.service
ROOT = Path(__file__).parents[2]
USERS_MODULES = ("queue.py", "tasks.py", "flows/__init__.py", "tasks/__init__.py")


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command `rollmill` of a new environment with the wheel; it finds all other packages in this one's."""
    folder = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), "."]
    subprocess.run(build, cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*install, str(wheel)], check=True)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (own,) = (Path(sys.prefix) / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{own}\n")
    return python.parent / "rollmill"


def test_a_users_modules_shadow_nothing_and_the_users_scorer_is_found(
    workplace: Any, installed: Path
) -> None:
    for name in USERS_MODULES:
        (workplace.folder / name).parent.mkdir(exist_ok=True)
        (workplace.folder / name).write_text("raise ImportError('the module of the working folder')\n")
    (workplace.folder / "mine.py").write_text("def length(candidate):\n    return len(candidate.answer)\n")
    settings = ["steps=2", "score.scorer=mine:length", "score.advantage=none"]
    words = [word for each in settings for word in ("--set", each)]
    done = subprocess.run(
        [str(installed), "run", "small", *words],
        cwd=workplace.folder,
        env=workplace.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout
    verified = subprocess.run(
        [str(installed), "verify", "small"], cwd=workplace.folder, capture_output=True, text=True, check=False
    )
    assert (verified.returncode, verified.stderr) == (0, ""), verified.stdout + verified.stderr
    where = "import rollmill.flows; print(rollmill.flows.__file__)"
    found = subprocess.run(
        [str(installed.parent / "python"), "-P", "-c", where],
        cwd=workplace.folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(found.stdout.strip()).is_relative_to(installed.parents[1])
