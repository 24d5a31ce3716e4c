"""A flow whose task runs hang, or end, in a process that a test may end: `python hanging_flow.py FOLDER HANG [FLOW_RUN]`.

With a flow run's id it does not begin one, but works on that one again, as Prefect's Retry does. Once a task run hangs,
the file `hangs` is in the folder. It exits within the seconds of the variable EXIT_TIMEOUT_S.
"""

import asyncio
import os
import sys
from pathlib import Path
from uuid import UUID

from prefect import flow, get_client
from prefect.flow_engine import run_flow_async

from flows.commands.ending import flow_command
from flows.running.folder import is_finished
from flows.ui.leftovers import mark_leftovers
from flows.ui.picture import picture_of
from flows.ui.recording import Recording
from flows.ui.step_runs import StepRuns
from flows.ui.terminating import ended_in_order
from tasks.observe.config import ObserveConfig
from tasks.store.filesystem import files_of
from tasks.store.layout import RunFolder

N_TASK_RUNS = 4


class Part:
    def __init__(self, folder: Path, hangs: bool) -> None:
        self.folder, self.hangs = folder, hangs

    async def sample(self) -> str:
        if self.hangs:
            (self.folder / "hangs").touch()
            await asyncio.sleep(3600.0)
        return "sampled"


@flow(persist_result=False)
async def hanging(folder: str, hang: bool) -> None:
    recording = Recording(ObserveConfig())
    picture = picture_of("all", recording)
    run = RunFolder(Path(folder))
    await mark_leftovers(run, files_of(run), timeout_s=30)
    config = ObserveConfig(step_run_timeout_s=60.0, exit_timeout_s=30.0)
    with ended_in_order():
        async with StepRuns(config, "hanging") as step_runs:
            step_runs.expect(["step 1"])
            async with step_runs.of("step 0"), asyncio.TaskGroup() as fan_out:
                for group in range(N_TASK_RUNS):
                    fan_out.create_task(picture.rollout(Part(Path(folder), hang), 0, group))
    await recording.wait_until_recorded()


async def work(folder: str, hang: bool, flow_run_id: str) -> None:
    arguments = {"folder": folder, "hang": hang}
    if not flow_run_id:
        await hanging(**arguments)
        return
    async with get_client() as client:
        flow_run = await client.read_flow_run(UUID(flow_run_id))
    await run_flow_async(hanging, flow_run=flow_run, parameters=arguments)


if __name__ == "__main__":
    timeout_s = float(os.environ.get("EXIT_TIMEOUT_S", "60"))
    with flow_command(lambda: is_finished(RunFolder(Path(sys.argv[1]))), timeout_s):
        asyncio.run(work(sys.argv[1], sys.argv[2] == "hang", "".join(sys.argv[3:])))
