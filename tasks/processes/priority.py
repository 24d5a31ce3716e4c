"""The priority of a process among those that compete for the same CPUs."""

import os
from contextlib import suppress
from pathlib import Path

# The kernel weighs a process of nice 5 with 335, and others with 1024.
NICENESS = 5


def lower_priority() -> None:
    """Give this process, and those that it starts, about a third of the share of a busy CPU that others get."""
    os.nice(NICENESS)
    # Linux weighs the processes of one session against each other, and sessions by this file. The kernel refuses a second
    # change within 0.1 s from users other than root.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICENESS))
