"""Where a trainer's seconds went: planted delays on two ranks, found at the flow and booked to what caused them."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from rollmill.tasks.observe.spans import Recorder, Span, recording
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.service.commands import AwaitCheckpoint, BeginCheckpoint, LoadPolicy, TrainStep
from rollmill.tasks.train.service.rank_spans import command_starts
from rollmill.tasks.train.service.rank_timeline import exclusive_seconds

SLOW_S = 0.8
"""How much longer the last rank takes for each micro-batch."""
PAUSE_S = 0.5
"""How long nothing is asked of the trainer."""

Owned = dict[str, dict[str, float]]
"""Seconds by process and by name of the span, `NAME of CAUSE` where it has one."""


def attribute(spans: Sequence[Span], step: int) -> Owned:
    of_ranks: dict[str, list[Span]] = defaultdict(list)
    for each in spans:
        if each.step == step:
            name = f"{each.name} of {each.cause}" if each.cause else each.name
            of_ranks[each.process].append(each._replace(name=name))
    return {process: exclusive_seconds(found) for process, found in of_ranks.items()}


def find_unattributed(spans: Sequence[Span], process: str) -> float:
    """Share of a rank's time, from its first span to its last, that belongs to none.

    Without the longest gap: it may have lost the processor there.
    """
    own = sorted(
        (each.started_ns, each.started_ns + each.duration_ns) for each in spans if each.process == process
    )
    began, until, gaps = own[0][0], own[0][0], list[int]()
    for started, ended in own:
        gaps.append(max(0, started - until))
        until = max(until, ended)
    return sum(sorted(gaps)[:-1]) / (until - began)


@pytest.mark.service
async def test_a_slow_rank_is_found_and_the_waits_of_the_others_are_attributed_to_it(
    run_trainer: Callable[[TrainConfig], AbstractAsyncContextManager[Any]],
    tiny_model: Path,
    batches: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    config = TrainConfig(
        ranks=2, annotate_every=1, loss={"name": "planted_losses:slow", "args": {"seconds": SLOW_S}}
    )
    run, recorder = tmp_path / "run", Recorder("flow")
    digests = [batches.write_step(run, step, batches.uneven_rows(16, seed=step)) for step in range(2)]
    with recording(recorder):
        async with run_trainer(config) as (client, _):
            await client.do(
                LoadPolicy(
                    run_id="r",
                    incarnation=1,
                    model=str(tiny_model),
                    folder=str(run),
                    checkpoint=None,
                    version=0,
                )
            )
            for step in range(2):
                await asyncio.sleep(PAUSE_S)
                asked_ns = time.time_ns()
                starts = dict[str, int]()
                command = TrainStep(folder=str(run), run_id="r", step=step, digest=digests[step])
                result = await client.do(command, starts=starts)
            answered_ns = time.time_ns()
            assert await client.logprobs([[1, 2, 3]])
            await client.do(BeginCheckpoint(folder=str(run), version=2))
            await client.do(AwaitCheckpoint(version=2))
    spans = recorder.take()

    step = [each for each in spans if each.started_ns >= asked_ns and each.process == "trainer/0"]
    assert min(each.started_ns for each in step) < answered_ns
    n_slow = sum((each.process, each.step, each.name) == ("trainer/1", 1, "forward") for each in spans)
    of_ranks = attribute(spans, 1)
    planted_s, forward_s = n_slow * SLOW_S, of_ranks["trainer/1"]["forward"]
    waited_s = of_ranks["trainer/0"]["waiting_for_rank of trainer/1"]
    assert forward_s >= planted_s, of_ranks
    assert waited_s > 0.5 * planted_s, "less what held up the other rank on a busy machine"
    assert of_ranks["trainer/1"].get("waiting_for_rank of trainer/0", 0.0) < waited_s
    for process in ("trainer/0", "trainer/1"):
        found = of_ranks[process]
        assert found["idle of no command"] > 0.9 * PAUSE_S, found
        assert {"reading_batch", "packing", "forward", "backward", "optimizer", "annotating"} <= set(found)
        assert {"parity", "checkpointing"} <= set(found)
        assert find_unattributed(spans, process) < 0.02, spans

    assert starts.keys() == {"trainer/0", "trainer/1"}
    assert all(asked_ns <= each < answered_ns for each in starts.values())

    values = {each.name: each.value for each in result.metrics if each.env == "all"}
    assert values["train/start_skew_s"] == pytest.approx(1e-9 * (max(starts.values()) - min(starts.values())))
    assert values["train/slowest_rank"] == 1.0
    spread_s = forward_s - of_ranks["trainer/0"]["forward"]
    assert values["train/forward_spread_s"] == pytest.approx(spread_s, rel=0.1)
    assert values["train/rank_spread_s"] > 0.5 * planted_s
    waits_s = (each for name, each in of_ranks["trainer/0"].items() if name.startswith("waiting_for_rank"))
    assert 0.5 * planted_s < values["train/waiting_for_rank_s"] < sum(waits_s) + 1e-6
    assert planted_s < result.duration_s < 1e-9 * (answered_ns - asked_ns)


def test_a_rank_starts_a_command_with_its_first_span_other_than_a_wait() -> None:
    spans = [
        Span("trainer/0", "main", "forward", 0, 1, 2),
        Span("trainer/0", "main", "idle", 1, 3, 2, "no command"),
        Span("trainer/0", "main", "reading_batch", 1, 5, 1),
        Span("trainer/0", "main", "forward", 1, 6, 1),
        Span("trainer/1", "main", "waiting_for_rank", 1, 5, 1, "trainer/0"),
        Span("trainer/1", "main", "reading_batch", 1, 6, 1),
        Span("trainer/2", "main", "idle", 1, 3, 2, "no command"),
    ]
    assert command_starts(spans) == {"trainer/0": 5, "trainer/1": 6}
