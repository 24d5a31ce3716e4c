"""Looking where threads stand."""

import gc
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tasks.observe.standing import frames_of_threads


@contextmanager
def collections_seen() -> Iterator[list[str]]:
    """A collection at every chance; names of the functions in which one began."""
    began: list[str] = []

    def note(phase: str, _: Mapping[str, int]) -> None:
        began.append(sys._getframe(1).f_code.co_name)

    before = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        yield began
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)


def test_no_garbage_is_collected_while_threads_are_looked_at() -> None:
    over = threading.Event()
    waiting = [threading.Thread(target=over.wait) for _ in range(4)]
    for each in waiting:
        each.start()
    try:
        with collections_seen() as began:
            frames = frames_of_threads()
    finally:
        over.set()
    for each in waiting:
        each.join()

    assert {each.ident for each in waiting} <= frames.keys()
    assert frames_of_threads.__name__ not in began
    assert gc.isenabled()
