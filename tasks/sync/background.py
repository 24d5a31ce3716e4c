"""What makes a thread work beside the one that computes tokens, in the same process, without holding it up."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SWITCH_INTERVAL_S = 0.0002
_USUAL_SWITCH_INTERVAL_S = sys.getswitchinterval()
"""As the process has it: an order that was given up may end in the midst of the next one."""


@contextmanager
def beside_the_model() -> Iterator[None]:
    """For the thread's whole work: any core, one core at a time, and the interpreter given back soon.

    vLLM's worker on CPU may be pinned to a core, which a thread inherits; a second team of OpenMP threads would fight
    the first for cores; and each time that the model's thread comes back from a kernel, it waits as long as the
    interpreter's switch interval, 5 ms by default, for a thread that runs Python. The thread's priority stays: one
    that waits for a core while it holds the interpreter would hold up the model's for as long.
    """
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    torch._C.set_num_threads(1)  # this thread's; vLLM's worker on CPU switches torch.set_num_threads off
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(_USUAL_SWITCH_INTERVAL_S)
