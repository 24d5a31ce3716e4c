"""Raw log-probabilities of known sequences, for comparing with a server's."""

from collections.abc import Sequence

import numpy as np
import torch

from tasks.train.engine import Engine
from tasks.train.micro_batch import padded
from tasks.train.packing import pack
from tasks.train.samples import Samples


@torch.no_grad()
def sequence_logprobs(
    engine: Engine, sequences: Sequence[Sequence[int]], budget_tokens: int
) -> list[list[float]]:
    """[B][T-1] log p(token i+1 | tokens 0..i) in nats, at temperature 1; under ZeRO-3 a collective.

    Every rank computes all of them, so that ranks stay in step.
    """
    token_ids = [np.asarray(each, np.int64) for each in sequences]
    samples = Samples.known(token_ids, [np.arange(len(each)) > 0 for each in token_ids])
    rows = [row for row, mask in enumerate(samples.loss_masks) if mask.any()]
    found: list[list[float]] = [[] for _ in sequences]
    for places in pack([len(sequences[row]) for row in rows], 1, budget_tokens)[0]:
        chosen = [rows[place] for place in places]
        batch = padded(samples, chosen, [""], engine.device)
        logprobs = engine.forward(batch).logprobs
        for row, values in zip(
            chosen, logprobs.split([len(sequences[row]) - 1 for row in chosen]), strict=True
        ):
            found[row] = values.tolist()
    return found
