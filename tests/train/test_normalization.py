"""Denominators and learning rates, by hand."""

import pytest
import torch

from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.lr_schedule import learning_rate
from rollmill.tasks.train.objective.losses.token_loss import Tokens
from rollmill.tasks.train.objective.normalization import denominator, sum_losses

LOSSES = torch.tensor([1.0, 3.0, 5.0, 7.0, 9.0, 11.0])
ROWS = torch.tensor([0, 0, 1, 2, 2, 2])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"normalization": "token"}, 36 / 6),
        ({"normalization": "sequence"}, (2 + 5 + 9) / 3),
        ({"normalization": "fixed_length", "normalization_tokens": 10}, 36 / 30),
    ],
)
def test_each_normalization_is_the_mean_of_its_name(settings: dict[str, object], expected: float) -> None:
    config = TrainConfig.model_validate(settings)
    tokens = Tokens(LOSSES, LOSSES, LOSSES, LOSSES, ROWS, 3)

    assert (sum_losses(config, LOSSES, tokens) / denominator(config, 6, 3)).item() == pytest.approx(expected)


def rates(n_updates: int, **settings: object) -> list[float]:
    """Learning rates of the first updates, in tenths."""
    config = TrainConfig.model_validate({"lr": 0.3, "warmup_steps": 3} | settings)
    return [round(10.0 * learning_rate(config, n), 5) for n in range(n_updates)]


def test_rate_rises_over_the_first_updates_and_stays() -> None:
    assert rates(5) == [1.0, 2.0, 3.0, 3.0, 3.0]
    assert rates(2, warmup_steps=0) == [3.0, 3.0]


def test_rate_falls_to_its_share_over_the_updates_of_the_decay() -> None:
    linear = rates(9, lr_decay="linear", lr_decay_updates=7, min_lr_ratio=0.1)
    assert linear == [1.0, 2.0, 3.0, 3.0, 2.325, 1.65, 0.975, 0.3, 0.3]
    cosine = rates(9, lr_decay="cosine", lr_decay_updates=7)
    assert cosine[3:] == [3.0, 2.56066, 1.5, 0.43934, 0.0, 0.0]
