"""The benchmark `algorithms` runs every preset of conf/algorithms that needs nothing else."""

import pytest

from benchmarks.algorithms import COMPARED, OF_TASK, SETTINGS
from rollmill.flows.configuration.settings import load


def test_it_compares_most_presets() -> None:
    assert len(COMPARED) >= 8


@pytest.mark.parametrize("algorithm", COMPARED)
def test_the_settings_of_an_algorithm_are_right(algorithm: str) -> None:
    config = load(f"quickstart+{algorithm}", (*SETTINGS, *OF_TASK.get(algorithm, ())))
    assert config.steps == 20
