"""What the garbage collector need not look at."""

import gc


def keep_for_good() -> None:
    """Take all that is in memory now out of the garbage collector's sight.

    A collection of everything stalls the event loop: for 0.15 s with what Prefect, Polars and pyarrow bring along,
    for a third of that with what a run makes.
    """
    gc.collect()
    gc.freeze()
