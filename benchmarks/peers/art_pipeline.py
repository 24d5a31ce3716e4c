"""openpipe-art's own pipeline over given latencies; runs in a separate environment, without Rollmill.

Reads the work as JSON from standard input, prints the timeline as JSON in the last line of standard output. What
ART does is ART's: `gather_trajectory_groups` with RULER as its `after_each`, as its documentation shows it. What
is outside ART sleeps: the policy behind the rollouts, and the judge behind RULER, each with its slots.
"""

import asyncio
import json
import re
import sys
import time
from typing import Any

import art
import litellm
from art.rewards import ruler_score_group
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

WARM_UP = -1
"""The group before the clock starts: ART and litellm import much at the first call."""


class Stopwatch:
    """Slots whose holders sleep, and when they were held."""

    def __init__(self, n_slots: int) -> None:
        self._slots = asyncio.Semaphore(n_slots)
        self._origin_s = time.perf_counter()
        self.intervals: list[tuple[float, float]] = []

    async def hold(self, seconds: float) -> None:
        """Wait for a slot, first come first served, and sleep in it."""
        async with self._slots:
            start_s = time.perf_counter() - self._origin_s
            await asyncio.sleep(seconds)
            self.intervals.append((start_s, time.perf_counter() - self._origin_s))


class Judge(litellm.CustomLLM):  # type: ignore[misc]  # litellm is in the peer's environment alone
    """Answers RULER's question about a group after that group's seconds."""

    def __init__(self, stopwatch: Stopwatch, group_scores_s: list[float]) -> None:
        super().__init__()
        self._stopwatch, self._group_scores_s = stopwatch, group_scores_s

    async def acompletion(self, *_: object, **request: object) -> litellm.ModelResponse:
        question = json.dumps(request["messages"])
        found = re.search(r"group (-?\d+)", question)
        assert found, question
        group = int(found[1])
        ids = re.findall(r'<trajectory id=\\+"(\d+)', question)
        await self._stopwatch.hold(0.0 if group == WARM_UP else self._group_scores_s[group])
        scores = [{"trajectory_id": each, "explanation": "", "score": 1.0 / int(each)} for each in ids]
        message = {"role": "assistant", "content": json.dumps({"scores": scores})}
        return litellm.ModelResponse(choices=[{"message": message, "finish_reason": "stop"}])


async def rollout(stopwatch: Stopwatch, group: int, sample: int, seconds: float) -> art.Trajectory:
    """One trajectory, after its seconds."""
    await stopwatch.hold(seconds)
    answer = ChatCompletionMessage(role="assistant", content=f"answer {sample}")
    return art.Trajectory(
        messages_and_choices=[
            {"role": "user", "content": f"problem of group {group}"},
            Choice(finish_reason="stop", index=0, message=answer),
        ],
        reward=0.0,
    )


async def gather(work: dict[str, Any], groups: dict[int, list[float]]) -> dict[str, Any]:
    """ART over these groups; the timeline."""
    rollouts, scores = Stopwatch(work["rollout_slots"]), Stopwatch(work["scoring_slots"])
    litellm.custom_provider_map = [
        {"provider": "stub", "custom_handler": Judge(scores, work["group_scores_s"])}
    ]
    started_s = time.perf_counter()
    gathered = await art.gather_trajectory_groups(
        (
            art.TrajectoryGroup(
                rollout(rollouts, group, sample, seconds) for sample, seconds in enumerate(rollouts_s)
            )
            for group, rollouts_s in groups.items()
        ),
        pbar_desc=None,
        after_each=lambda group: ruler_score_group(group, "stub/judge"),
    )
    makespan_s = time.perf_counter() - started_s
    rewarded = sum(trajectory.reward > 0 for group in gathered for trajectory in group)
    if rewarded != sum(map(len, groups.values())):
        raise RuntimeError(f"ART rewarded {rewarded} trajectories of {sum(map(len, groups.values()))}")
    return {"makespan_s": makespan_s, "rollouts": rollouts.intervals, "scores": scores.intervals}


async def main() -> None:
    work = json.load(sys.stdin)
    await gather(work, {WARM_UP: [0.0, 0.0]})
    print(json.dumps(await gather(work, dict(enumerate(work["rollouts_s"])))))


if __name__ == "__main__":
    asyncio.run(main())
