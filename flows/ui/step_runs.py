"""A flow run of Prefect's for each step and each evaluation, whose page holds its rollouts and scores."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Self
from uuid import UUID, uuid4

from prefect import flow, task
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import Cancelled, Completed, Crashed, Failed, Pending, Running

from flows.ui.background import Background
from flows.ui.belonging import belonging_to, run_flow_run
from flows.ui.heartbeats import heartbeats
from flows.ui.progress import say
from tasks.observe.config import ObserveConfig
from tasks.observe.spans import span

CANCELLED = (StateType.CANCELLING, StateType.CANCELLED)
UNDONE = "The run ended before this was done."
ALIVE = "It was called crashed, and goes on: its signs of life came late."


@flow(name="step", persist_result=False)
def step() -> None:
    """Rollouts and scores of one step, or of one evaluation. It is never called: runs of it are made through the API."""


@task(name="step", persist_result=False)
def node() -> None:
    """What stands for a step's flow run among the task runs of the run's flow run; never called."""


class StepRuns:
    """Makes the flow runs ahead, and tells Prefect's server in the background how they stand; an async context manager.

    Nothing waits for the server but a step that begins before its flow run was made, for `observe.step_run_timeout_s`
    at most. A step without a flow run of its own has its task runs in that of the run.

    Args:
        config: how long to wait; whether there are such flow runs at all.
        name: of the run; their names begin with it, and it is their tag.
        warn: tells people something once.
    """

    def __init__(self, config: ObserveConfig, name: str, warn: Callable[[str], None] = say) -> None:
        self._config, self._name = config, name
        self._background = Background(config, "the flow runs of steps", warn)
        self._expected: dict[str, asyncio.Future[FlowRun | None]] = {}
        self._open: dict[str, FlowRun] = {}
        self._ids: dict[str, UUID] = {}
        self._waits = True

    async def __aenter__(self) -> Self:
        self._run_id = run_flow_run().id
        await self._background.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._background.close(partial(self._end, error), in_haste=error is not None)

    def expect(self, names: Collection[str]) -> None:
        """Make the flow runs of what begins soon. Example of a name: "step 12"."""
        for name in names if self._config.step_runs else ():
            if name not in self._expected:
                self._expected[name] = made = asyncio.get_running_loop().create_future()
                self._background.put(partial(self._make, name, made))

    @asynccontextmanager
    async def of(self, name: str) -> AsyncIterator[None]:
        """Inside, task runs belong to the flow run of this name; it ends with what is inside, or with the run."""
        self.expect([name])
        flow_run = await self._made(name)
        if flow_run is None:
            yield
            return
        self._open[name], self._ids[name] = flow_run, flow_run.id
        self._background.put(lambda client: _set(client, flow_run.id, Running()))
        self._background.put(self._mend)
        with belonging_to(step, flow_run), heartbeats(step, flow_run):
            yield
        del self._open[name]
        self._background.put(lambda client: _set(client, flow_run.id, Completed()))

    def taken_id(self, name: str) -> UUID:
        """The flow run of what is over, which is forgotten here; that of the run where it had none."""
        return self._ids.pop(name, self._run_id)

    async def _made(self, name: str) -> FlowRun | None:
        made = self._expected.get(name)
        if made is None:
            return None
        if not made.done() and self._waits and self._background.is_well:
            with span("recording", cause="flow run of the step"):
                await asyncio.wait([made], timeout=self._config.step_run_timeout_s)
        if not made.done():
            self._waits = False  # a server that was too slow once holds up no further step
            within = f"within observe.step_run_timeout_s = {self._config.step_run_timeout_s:g} s"
            self._background.tell(f"that of {name} was not made {within}")
            made.set_result(None)
        del self._expected[name]
        return made.result()

    async def _mend(self, client: PrefectClient) -> None:
        """Call the run Running again where it was called Crashed though it lives: its heartbeats came too late."""
        if (await client.read_flow_run(self._run_id)).state_type == StateType.CRASHED:
            await _set(client, self._run_id, Running(message=ALIVE))

    async def _make(self, name: str, made: "asyncio.Future[FlowRun | None]", client: PrefectClient) -> None:
        """Make a flow run and its node in the run's flow run."""
        flow_run = None
        if self._background.is_closing or made.done():
            return
        try:
            below = await client.create_task_run(
                node, self._run_id, dynamic_key=uuid4().hex, name=name, state=Pending()
            )
            flow_run = await client.create_flow_run(
                step,
                name=f"{self._name} / {name}",
                tags=[self._name],
                parent_task_run_id=below.id,
                state=Pending(),
            )
        finally:
            if not made.done():
                made.set_result(flow_run)
            elif flow_run is not None:
                await _remove(client, flow_run)  # nobody waits for it any longer

    async def _end(self, error: BaseException | None, client: PrefectClient) -> None:
        """End what is open as the run ends, and remove what was made ahead and never begun."""
        if self._open:
            state = await self._last_state(client, error)
            for flow_run in self._open.values():
                await _set(client, flow_run.id, state(message=UNDONE))
        for made in self._expected.values():
            unused = made.result() if made.done() else None
            if unused is not None:
                await _remove(client, unused)

    async def _last_state(
        self, client: PrefectClient, error: BaseException | None
    ) -> Callable[..., State[object]]:
        if isinstance(error, Exception):
            return Failed
        run = await client.read_flow_run(self._run_id)
        return Cancelled if run.state_type in CANCELLED else Crashed


def name_of_step(step: int) -> str:
    """Example: "step 12"."""
    return f"step {step}"


def name_of_evaluation(version: int) -> str:
    """Example: "version 12 / evaluation"."""
    return f"version {version} / evaluation"


async def _set(client: PrefectClient, flow_run_id: UUID, state: State[object]) -> None:
    await client.set_flow_run_state(flow_run_id, state, force=True)


async def _remove(client: PrefectClient, flow_run: FlowRun) -> None:
    await client.delete_flow_run(flow_run.id)
    if flow_run.parent_task_run_id:
        await client.delete_task_run(flow_run.parent_task_run_id)
