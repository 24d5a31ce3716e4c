"""A chunk of a group whose work is nothing."""

import asyncio

from rollmill.tasks.rollout.task import SampledChunk
from rollmill.tasks.score.task import ScoredChunk
from rollmill.tasks.store.rows import no_rows


class EmptyChunk:
    """No trajectory is sampled, and none scored; each takes one turn of the event loop."""

    async def sample(self) -> SampledChunk:
        await asyncio.sleep(0)
        return SampledChunk(no_rows("rollouts"), ())

    async def score(self) -> ScoredChunk:
        await asyncio.sleep(0)
        return ScoredChunk(no_rows("scores"))
