"""What a processor is worth at this moment: the CPU seconds of a fixed piece of work, to hold other CPU seconds against.

Python's own arithmetic and objects, as an event loop's callbacks are made of; bandwidths of memory or disk are not in it.
"""

import time

REPEATS, ROUNDS = 5, 1_000_000


def calibration_cpu_s() -> float:
    """CPU seconds of this thread for the work, about 0.06; the least of five."""
    return min(_once() for _ in range(REPEATS))


def _once() -> float:
    started, places = time.thread_time(), dict.fromkeys(range(64), 0)
    for number in range(ROUNDS):
        places[number & 63] += number
    return time.thread_time() - started
