"""A process may open as many files as its machine allows."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from rollmill.tasks.processes.machine import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[1])))
allow_open_files()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize("hard", [256, 2000])
def test_the_limit_of_open_files_is_raised_to_the_highest_that_is_allowed(hard: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(hard)], capture_output=True, check=True, text=True
    )
    assert int(done.stdout) == hard
