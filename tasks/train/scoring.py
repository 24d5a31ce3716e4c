"""Raw log-probabilities of known sequences, for comparing with a server's."""

from collections.abc import Sequence

import numpy as np
import torch

from tasks.train.engine import Engine
from tasks.train.samples import Samples


@torch.no_grad()
def sequence_logprobs(engine: Engine, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """[B][T-1] log p(token i+1 | tokens 0..i) in nats, at temperature 1; under ZeRO-3 a collective.

    Every rank computes all of them, so that ranks stay in step.
    """
    token_ids = [np.asarray(each, np.int64) for each in sequences]
    samples = Samples.known(token_ids, [np.arange(len(each)) > 0 for each in token_ids])
    rows = [row for row, mask in enumerate(samples.loss_masks) if mask.any()]
    found: list[list[float]] = [[] for _ in sequences]
    for chosen in engine.packer.plan(samples, rows, 1)[0]:
        batch = engine.packer.micro_batch(samples, chosen, [""])
        logprobs = engine.forward(batch).logprobs
        for row, values in zip(
            chosen, logprobs.split([len(sequences[row]) - 1 for row in chosen]), strict=True
        ):
            found[row] = values.tolist()
    return found
