"""The order of a sync, its deadline, and what becomes of failures; with a trainer and a server that only note."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tasks.errors import ParityError, ServiceDiedError, SyncError, TransientRequestError
from tasks.sync.config import SyncConfig
from tasks.sync.drive import check_parity, join, send_weights

SOON = SyncConfig(timeout_s=0.2)


@dataclass
class Both:
    """A trainer and a server in one; `slow` never ends, `failing` raises."""

    url: str = "http://server"
    slow: str = ""
    failing: dict[str, Exception] = field(default_factory=dict)
    shift: float = 0.0
    events: list[str] = field(default_factory=list)

    async def _note(self, event: str) -> None:
        self.events.append(event)
        await asyncio.sleep(0)
        if event in self.failing:
            raise self.failing[event]
        if event == self.slow:
            await asyncio.Event().wait()
        self.events.append(f"{event} done")

    def __getattr__(self, name: str) -> Any:
        async def noted(*_: Any) -> dict[str, Any]:
            await self._note(name)
            return {"bytes": 8, "buckets": 1, "seconds": 0.0}

        return noted

    async def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        await self._note("logprobs")
        return [[-1.0] * (len(each) - 1) for each in sequences]

    async def prompt_logprobs(self, sequence: np.ndarray, timeout_s: float) -> np.ndarray:
        await self._note("prompt_logprobs")
        return np.full(len(sequence) - 1, -1.0 + self.shift, np.float32)


async def parity(both: Both, threshold: float = 1e-4) -> float:
    sequences = [np.arange(5, dtype=np.int32)] * 2
    return await check_parity(both, both, sequences, "run:1:2", threshold=threshold, timeout_s=0.2)


async def test_the_live_model_is_open_only_while_requests_are_frozen() -> None:
    both = Both()
    assert await send_weights(both, both, "run:1:2", SOON) == {"bytes": 8, "buckets": 1, "seconds": 0.0}
    order = [
        "pause done",
        "start_weight_update",
        "start_weight_update done",
        "update_weights",
        "update_weights done",
        "finish_weight_update",
        "finish_weight_update done",
        "resume",
    ]
    assert [event for event in both.events if event in order] == order


async def test_sender_and_receiver_work_at_the_same_time() -> None:
    both = Both()
    await send_weights(both, both, "run:1:2", SOON)
    assert both.events.index("send") < both.events.index("update_weights done")
    assert both.events.index("update_weights") < both.events.index("send done")


async def test_both_ends_join_at_the_same_time() -> None:
    both = Both()
    await join(both, both, SOON)
    assert both.events.index("connect") < both.events.index("init_weight_transfer done")
    assert both.events.index("init_weight_transfer") < both.events.index("connect done")


@pytest.mark.parametrize("slow", ["weight_plan", "pause", "send", "update_weights", "finish_weight_update"])
async def test_whatever_takes_too_long_ends_at_the_deadline_by_name(slow: str) -> None:
    both = Both(slow=slow)
    with pytest.raises(SyncError, match=r"http://server: taking version run:1:2 .* sync\.timeout_s = 0\.2 s"):
        await send_weights(both, both, "run:1:2", SOON)


@pytest.mark.parametrize("slow", ["rendezvous", "connect", "init_weight_transfer"])
async def test_a_meeting_that_takes_too_long_ends_at_the_deadline_by_name(slow: str) -> None:
    both = Both(slow=slow)
    with pytest.raises(SyncError, match=r"joining the trainer took longer than sync\.timeout_s"):
        await join(both, both, SOON)


@pytest.mark.parametrize("slow", ["logprobs", "prompt_logprobs"])
async def test_a_comparison_that_takes_too_long_ends_at_the_deadline_by_name(slow: str) -> None:
    with pytest.raises(SyncError, match="comparing log-probabilities at version run:1:2 took longer"):
        await parity(Both(slow=slow))


@pytest.mark.parametrize("failing", ["pause", "update_weights", "send", "resume"])
async def test_a_failure_on_the_way_says_which_server_was_taking_what(failing: str) -> None:
    both = Both(failing={failing: TransientRequestError("500 out of memory")})
    with pytest.raises(SyncError, match="http://server: taking version run:1:2: 500 out of memory"):
        await send_weights(both, both, "run:1:2", SOON)


async def test_the_death_of_the_trainer_is_told_as_its_own() -> None:
    both = Both(failing={"send": ServiceDiedError("trainer", "it ended")})
    with pytest.raises(ServiceDiedError, match="trainer: it ended"):
        await send_weights(both, both, "run:1:2", SOON)


async def test_log_probabilities_within_the_threshold_pass() -> None:
    assert await parity(Both(shift=2**-15)) == 2**-15


@pytest.mark.parametrize("shift", [2**-10, -1.0, float("nan")])
async def test_log_probabilities_beyond_it_name_server_version_difference_and_threshold(shift: float) -> None:
    with pytest.raises(
        ParityError, match=r"http://server at version run:1:2: .* by .* nats, allowed are 0\.0001"
    ):
        await parity(Both(shift=shift))


async def test_without_sequences_nothing_is_compared() -> None:
    both = Both()
    assert np.isnan(await check_parity(both, both, [], "run:1:2", threshold=1e-4, timeout_s=0.2))
    assert both.events == []
