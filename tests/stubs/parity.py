"""How far a server's log-probabilities are from a trainer's."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.sync.broadcast import fetch_logprobs
from rollmill.tasks.sync.weight_parity import LogprobDifferences

FLOAT32_NATS = 1e-4
"""Accepted in single precision."""


async def largest_difference(
    source: Any, client: VllmClient, sequences: Sequence[np.ndarray], version: str
) -> float:
    """The largest difference of a token's log-probability, in nats."""
    expecting = source.logprobs([each.tolist() for each in sequences])
    expected, found = await fetch_logprobs(expecting, client, sequences, version, timeout_s=60.0)
    return LogprobDifferences.measure(expected, found).largest
