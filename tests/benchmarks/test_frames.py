"""One completion's request and one call of a scorer are few frames from the loop: readers can follow them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.frames import ENDS, MAX_FILES, MAX_FRAMES

pytestmark = pytest.mark.service


def test_a_completion_and_a_score_are_few_frames_and_files_from_the_loop() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.frames"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    for name in ENDS:
        assert 0 < figures[f"{name}_frames"] <= MAX_FRAMES, done.stdout
        assert 0 < figures[f"{name}_files"] <= MAX_FILES, done.stdout
