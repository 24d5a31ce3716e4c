"""A sampler that says prepared texts."""

from collections.abc import Sequence

import numpy as np

from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer
from rollmill.tasks.rollout.episode import SampledTokens
from rollmill.tasks.rollout.trajectory import TrajectoryRequest

END = 1


class Answering:
    """A sampler that says prepared texts, and keeps what it was given and the seeds. Token t is routed to expert t % 5."""

    def __init__(self, tokenizer: ChatTokenizer, said: Sequence[str]) -> None:
        self.tokenizer, self.said = tokenizer, list(said)
        self.calls: list[tuple[list[int], list[int]]] = []
        self.seeds: list[int] = []

    async def sample(
        self, work: TrajectoryRequest, token_ids: np.ndarray, until: float, routing_from: int | None = None
    ) -> SampledTokens:
        said = self.said[len(self.calls) % len(self.said)]
        ids = np.append(self.tokenizer._ids(said), END).astype(np.int32)
        self.calls.append((token_ids.tolist(), ids.tolist()))
        self.seeds.append((work.seed + len(token_ids)) % (1 << 63))
        version = len(self.calls)
        experts: np.ndarray | None = None
        if routing_from is not None:
            routed = np.concatenate([token_ids, ids])[routing_from:-1] % 5
            experts = np.repeat(routed, 6).reshape(-1, 3, 2).astype(np.uint8)
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
        return SampledTokens(ids, logprobs, [(0, version)], "stop", "http://server", experts)
