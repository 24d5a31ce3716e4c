"""Where in the code a thread or task is."""

import asyncio
import gc
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rollmill.tasks.observe.stack_sites import PACKAGE_ROOT, describe_thread, thread_frames

COMMAND = """
import asyncio

def command(work):
    return asyncio.run(work)
"""
SCORE = """
async def score(library):
    return library()
"""


def define(file: str, source: str) -> dict[str, Any]:
    """What a file of ours would define."""
    names: dict[str, Any] = {}
    exec(compile(source, f"{PACKAGE_ROOT}/{file}", "exec"), names)
    return names


command = define("flows/commands/planted.py", COMMAND)["command"]
score = define("tasks/score/planted.py", SCORE)["score"]


def looks() -> str:
    """A stub of a library's function that is sampled."""
    return describe_thread(asyncio.get_running_loop(), threading.get_ident())


async def write_bytes() -> str:
    """A stub of a library's task."""
    return looks()


async def call_back() -> str:
    seen = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(lambda: seen.set_result(looks()))
    return str(await seen)


def test_the_command_that_runs_the_loop_is_not_named_for_a_librarys_task() -> None:
    text = command(write_bytes())
    assert text.startswith("a task (write_bytes) in observe/test_stack_sites.py")
    assert "planted" not in text


def test_a_callback_of_a_library_is_named_by_its_file() -> None:
    text = command(call_back())
    assert text.startswith("a callback in observe/test_stack_sites.py")
    assert "planted" not in text


def test_the_innermost_function_of_rollmill_is_named_before_what_it_called() -> None:
    text = command(score(looks))
    assert "(score) in tasks/score/planted.py:3 score, observe/test_stack_sites.py" in text


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
            frames = thread_frames()
    finally:
        over.set()
    for each in waiting:
        each.join()

    assert {each.ident for each in waiting} <= frames.keys()
    assert thread_frames.__name__ not in began
    assert gc.isenabled()
