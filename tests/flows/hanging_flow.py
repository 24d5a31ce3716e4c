"""A flow whose task runs hang, or end, in a process that a test may end: `python hanging_flow.py FOLDER HANG [FLOW_RUN]`.

With a flow run's id it does not begin one, but works on that one again, as Prefect's Retry does. Once a task run hangs,
the file `hangs` is in the folder. It exits within the seconds of the variable EXIT_TIMEOUT_S.
"""

import asyncio
import os
import sys
from pathlib import Path
from uuid import UUID

from prefect import flow, get_client, task
from prefect.flow_engine import run_flow_async

from rollmill.flows.commands.flow_process import exit_in_time
from rollmill.flows.prefect_integration.leftovers import mark_leftovers
from rollmill.flows.prefect_integration.private_prefect import end_in_order
from rollmill.flows.prefect_integration.recording import Recording
from rollmill.flows.prefect_integration.task_runs import TaskRunRecorder
from rollmill.flows.run.folder import is_finished
from rollmill.tasks.observe.config import ObserveConfig
from rollmill.tasks.rollout.task import SampledChunk
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.rows import no_rows

N_ROLLOUTS = 4


class Chunk:
    def __init__(self, folder: Path, hangs: bool) -> None:
        self.folder, self.hangs = folder, hangs

    async def sample(self) -> SampledChunk:
        if self.hangs:
            (self.folder / "hangs").touch()
            await asyncio.sleep(3600.0)
        return SampledChunk(no_rows("rollouts"), ())


@task(name="step", persist_result=False)
async def step(recorder: TaskRunRecorder, folder: str, hang: bool) -> None:
    async def sample(group: int) -> None:
        async with recorder.rollout(Chunk(Path(folder), hang), 0, str(group)) as rolled:
            rolled.done(await rolled.work())

    async with asyncio.TaskGroup() as fan_out:
        for group in range(N_ROLLOUTS):
            fan_out.create_task(sample(group))


@flow(persist_result=False)
async def hanging(folder: str, hang: bool) -> None:
    config = ObserveConfig()
    recording = Recording()
    run = RunFolder(Path(folder))
    await mark_leftovers(run, open_files(run), timeout_s=30)
    with end_in_order():
        recording.count_start()
        await step(TaskRunRecorder(config, recording), folder, hang)
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
    with exit_in_time(lambda: is_finished(RunFolder(Path(sys.argv[1]))), timeout_s):
        asyncio.run(work(sys.argv[1], sys.argv[2] == "hang", "".join(sys.argv[3:])))
