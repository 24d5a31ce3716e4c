"""The endurance benchmark has a size for each step, or says that it has not."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.endurance import rss_mib, watched


def flow_of(run: Path, steps: int, then: str) -> subprocess.Popen[bytes]:
    """A process that has the metrics of so many steps, one after another, and then does something else."""
    code = f"""
import pathlib, time
for step in range({steps}):
    pathlib.Path({str(run)!r}, "metrics", f"step={{step:06d}}").mkdir(parents=True)
    time.sleep(0.2)
{then}
"""
    return subprocess.Popen([sys.executable, "-c", code])


def test_every_step_has_the_size_of_a_living_process(tmp_path: Path) -> None:
    sizes = watched(flow_of(tmp_path, 2, "time.sleep(1.0)"), tmp_path, 2)
    assert len(sizes) == 2
    assert min(sizes) > 1.0


def test_a_flow_that_ends_before_its_last_step_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="of 3 steps"):
        watched(flow_of(tmp_path, 1, ""), tmp_path, 3)


def test_a_flow_that_fails_is_told_by_its_status(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="status 7"):
        watched(flow_of(tmp_path, 1, "raise SystemExit(7)"), tmp_path, 3)


def test_a_process_that_is_gone_has_no_size() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(ProcessLookupError):
        rss_mib(process.pid)


def test_a_process_that_ended_and_was_not_waited_for_has_no_size() -> None:
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read()
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            pass
        with pytest.raises(ProcessLookupError):
            rss_mib(process.pid)
