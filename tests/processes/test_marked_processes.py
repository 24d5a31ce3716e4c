"""What tests start does not outlive them, even if they are killed."""

import subprocess
import sys
import time
import uuid
from pathlib import Path

from marked_processes import find_marked_processes

SERVERS = str(Path(__file__).parents[1] / "servers")
TESTS = """
import os, subprocess, sys, time
sys.path.insert(0, sys.argv[2])
from marked_processes import guard_marked_processes
with guard_marked_processes(sys.argv[1]):
    environment = os.environ | {"WORKPLACE": sys.argv[1]}
    subprocess.Popen(["sh", "-c", "sleep 600 & wait"], env=environment, start_new_session=True)
    print("started", flush=True)
    time.sleep(600)
"""


def test_marked_processes_end_when_the_process_of_the_tests_is_killed() -> None:
    marker = uuid.uuid4().hex
    with subprocess.Popen([sys.executable, "-c", TESTS, marker, SERVERS], stdout=subprocess.PIPE) as tests:
        try:
            assert tests.stdout
            assert tests.stdout.readline() == b"started\n"
            deadline = time.monotonic() + 30
            # The environment of a process can be read shortly after it has started.
            while not find_marked_processes(marker):
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            tests.kill()
    deadline = time.monotonic() + 30
    while left := find_marked_processes(marker):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
