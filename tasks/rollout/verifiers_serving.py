"""What the rollouts of one environment of the `verifiers` library share, and one rollout from its start to its score."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from tasks.rollout.verifiers_endpoint import PolicyEndpoint
from tasks.rollout.verifiers_episode import Finished
from tasks.rollout.verifiers_state import state_values
from tasks.rollout.verifiers_wire import Wire

MODEL = "policy"
KEY_VARIABLE = "ROLLMILL_POLICY_API_KEY"
"""Unset: the endpoint asks for no key, and no key of the user's must go to it."""


class Serving:
    """The environment's tool servers, the library's proxy and the policy's endpoint; up with the first rollout."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._endpoint = PolicyEndpoint()
        self._held: asyncio.Task[None] | None = None
        self._up: asyncio.Future[None]
        self._over: asyncio.Event

    async def play(
        self,
        task: Any,
        asked: Callable[[str, Wire], Awaitable[Wire]],
        version: str,
        states: Mapping[str, str],
    ) -> Finished:
        """Run one episode; every request for the policy's next message, with its trace's id, is put to `asked`."""
        await self._is_up()
        known: set[str] = set()
        asking: set[str] = set()

        def minted(trace: Any) -> None:
            async def ask(request: Wire) -> Wire:
                asking.add(trace.id)
                return await asked(trace.id, request)

            known.add(trace.id)
            self._endpoint.asked[trace.id] = ask

        try:
            record = await self._environment.run_episode(task, self._context(), on_trace=minted)
        finally:
            for trace_id in known:
                del self._endpoint.asked[trace_id]
        trace = next((each for each in record.traces if each.id in asking), None)
        return replace(finished(record, asking, version), state=state_values(trace, states))

    async def aclose(self) -> None:
        """End what is up."""
        if self._held is not None:
            self._over.set()
            await self._held
            self._held = None

    def _context(self) -> Any:
        from verifiers.v1 import EvalClientConfig, ModelContext

        client = EvalClientConfig(base_url=self._endpoint.url, api_key_var=KEY_VARIABLE)
        return ModelContext(model=MODEL, client=client)

    async def _is_up(self) -> None:
        if self._held is None:
            self._up, self._over = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._held = asyncio.create_task(self._hold())
        await asyncio.shield(self._up)

    async def _hold(self) -> None:
        """One task opens and closes what is shared, since the library's contexts belong to the task that entered."""
        try:
            async with self._endpoint, self._environment.serving():
                self._up.set_result(None)
                await self._over.wait()
        except Exception as error:
            if self._up.done():
                raise
            self._up.set_exception(error)
            self._held = None


def finished(record: Any, asking: set[str], version: str) -> Finished:
    """What a scorer may read of the library's record of an episode: the trace of the policy's own seat.

    A rollout that failed before it was scored is an error of the episode; one whose scoring failed has its error in the
    outcome, in place of the reward.
    """
    trace = next((each for each in record.traces if each.id in asking), None)
    if trace is None:
        errors = [*record.errors, *(error for each in record.traces for error in each.errors)]
        why = f": {_said(errors[-1])}" if errors else " and ended"
        return Finished({}, f"the environment never asked the policy{why}")
    outcome = {
        "reward": trace.reward,
        "rewards": {name: part and part.value for name, part in trace.rewards.items()},
        "metrics": dict(trace.metrics),
        "stop": trace.stop_condition,
        "version": version,
    }
    error = record.last_error or (None if trace.ok else trace.last_error)
    if error is None:
        return Finished(outcome)
    if not trace.timing.scoring.start:
        return Finished({}, _said(error))
    del outcome["reward"]
    return Finished(outcome | {"error": _said(error)})


def _said(error: Any) -> str:
    return f"{error.type}: {error.message}"
