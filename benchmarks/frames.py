"""How many frames of Rollmill are between a flow and one request to vLLM, and between the flow and one call of a scorer?

A run over stub services is traced: when the client sends a completion's request, and when a scorer's worker is asked, the stacks of
the asyncio tasks are joined, from the one that sends to the flow's, by who created each task. Frames of other packages are left out.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from types import FrameType
from typing import Any

from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.rollout.chat_tokenizer import save_character_tokenizer
from tests.stubs.prefect_server import prefect_server
from tests.stubs.trainer import StubTrainer
from tests.stubs.vllm_server import StubVllmServer

ROOT = Path(__file__).resolve().parents[1]
MAX_FRAMES, MAX_FILES = 15, 8
START = "flows/post_train.py"
ENDS = {
    "completion": ("tasks/rollout/task.py", "tasks/serve/http_connection.py", "send"),
    "score": ("tasks/score/task.py", "tasks/user_code/worker_process.py", "send"),
}
"""The file of the task that a path goes through, and the file and function where it ends."""


class StackTracer:
    """Joins the stacks of asyncio tasks; to be used as the event loop's task factory.

    Attributes:
        stacks: for each of `ENDS` the frames of the first call, from the flow to the end, as "file:line function".
    """

    def __init__(self) -> None:
        self.stacks: dict[str, list[str]] = {}

    def create_task(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any
    ) -> "asyncio.Task[Any]":
        """Create a task, and note the stack of its creator."""
        created = asyncio.Task(work, loop=loop, **options)
        created.creator_stack = _trace(sys._getframe(1))  # type: ignore[attr-defined]  # tasks take attributes
        return created

    def watch(self, frame: FrameType, event: str, _: object) -> None:
        """A profile function: keeps the first stack of each end."""
        if event != "call":
            return
        code = frame.f_code
        for name, (through, file, function) in ENDS.items():
            if name not in self.stacks and code.co_name == function and code.co_filename.endswith(file):
                stack = _trace(frame)
                if any(each.startswith(through) for each in stack):
                    begin = next(at for at, each in enumerate(stack) if each.startswith(START))
                    self.stacks[name] = stack[begin:]


def _trace(frame: FrameType | None) -> list[str]:
    """The frames of Rollmill up to a frame, after those that the running asyncio task was created in."""
    places: list[str] = []
    while frame is not None:
        if place := _place(frame):
            places.insert(0, place)
        frame = frame.f_back
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return places
    return [*getattr(task, "creator_stack", ()), *places]


def _place(frame: FrameType) -> str:
    """The frame as "file:line function"; empty if it is not of Rollmill."""
    path = os.path.realpath(frame.f_code.co_filename)
    if frame.f_code.co_name == "<listcomp>":  # a frame in Python 3.11 alone
        return ""
    for room in ("flows", "tasks"):
        if path.startswith(f"{ROOT}/{room}/"):
            return f"{path.removeprefix(f'{ROOT}/')}:{frame.f_lineno} {frame.f_code.co_qualname}"
    return ""


def trace(folder: Path) -> dict[str, list[str]]:
    """Run one step over stubs; returns the stacks."""
    from rollmill.flows.post_train import post_train  # Prefect reads its settings when it is imported
    from tests.stubs.toy_settings import validate_toy

    model = save_character_tokenizer(folder / "model")
    (model / "config.json").write_text("{}")
    trainer, ports = StubTrainer(0.0, 0.0), (free_port(), free_port())
    os.environ["ROLLMILL_TRAINER_TOKEN"] = trainer.token
    controls = [StubVllmServer(model, 0.0).serve(ports[0]), trainer.serve(ports[1])]
    config = validate_toy(
        {
            "steps": 1,
            "model": str(model),
            "rollout": {"groups_per_step": 2, "group_size": 2},
            "serve": {"urls": [f"http://127.0.0.1:{ports[0]}"]},
            "train": {"url": f"http://127.0.0.1:{ports[1]}"},
            "evaluate": {"every": 0},
            "store": {"root": str(folder / "runs")},
        }
    )
    tracer = StackTracer()

    async def run() -> None:
        asyncio.get_running_loop().set_task_factory(tracer.create_task)  # type: ignore[arg-type]  # it makes the tasks that a factory has to
        sys.setprofile(tracer.watch)
        try:
            await post_train("traced", config)
        finally:
            sys.setprofile(None)

    try:
        asyncio.run(run())
    finally:
        for control in controls:
            control.stop()
    return tracer.stacks


def count_files(stack: list[str]) -> int:
    """In how many files the frames of a stack are."""
    return len({each.partition(":")[0] for each in stack})


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name, prefect_server(Path(name) / "prefect"):
        stacks = trace(Path(name))
    figures: dict[str, int] = {}
    for name, stack in stacks.items():
        print(f"{name}: {len(stack)} frames in {count_files(stack)} files", *stack, sep="\n  ")
        figures |= {f"{name}_frames": len(stack), f"{name}_files": count_files(stack)}
    print(json.dumps({"benchmark": "frames"} | figures))


if __name__ == "__main__":
    main()
