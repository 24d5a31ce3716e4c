"""Metrics of tokens by environment, against the values themselves."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.tasks.observe.metrics import ALL, Metric, MetricTable
from rollmill.tasks.train.objective.token_metrics import add_metrics

ENVS = ("addition", "chess", "go")
values_of_tokens = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.floats(-1e3, 1e3),
        st.one_of(st.just(math.nan), st.floats(0.0, 10.0)),
        st.integers(0, 3),
    ),
    max_size=30,
)


def naive(of_env: str, name: str, values: list[float]) -> list[Metric]:
    found = np.array([each for each in values if not math.isnan(each)])
    if not len(found):
        return []
    stats = {"mean": found.mean(), "std": found.std(), "min": found.min(), "max": found.max()}
    return [Metric(name, of_env, stat, value) for stat, value in stats.items()]  # type: ignore[arg-type]


@settings(deadline=None, max_examples=60)
@given(values_of_tokens)
def test_metrics_do_not_depend_on_how_tokens_are_distributed_to_ranks_and_micro_batches(
    tokens: list[tuple[int, float, float, int]],
) -> None:
    tables = [MetricTable(), MetricTable()]
    for part in range(4):
        rows = [each for each in tokens if each[3] == part]
        values = {
            "train/loss": torch.tensor([row[1] for row in rows], dtype=torch.float64),
            "train/mismatch_nats": torch.tensor([row[2] for row in rows], dtype=torch.float64),
        }
        add_metrics(tables[part % 2], values, torch.tensor([row[0] for row in rows], dtype=torch.int64), ENVS)
    joined = MetricTable()
    joined.join(tables)

    expected = []
    for place, name in enumerate(("train/loss", "train/mismatch_nats"), 1):
        for number, env in enumerate((*ENVS, ALL)):
            chosen = [row[place] for row in tokens if env == ALL or row[0] == number]
            expected += naive(env, name, chosen)
    found = {(each.name, each.env, each.stat): each.value for each in joined.metrics()}
    assert {key for key in found if key[0] != "train/trained_tokens"} == {
        (each.name, each.env, each.stat) for each in expected
    }
    for each in expected:
        assert math.isclose(found[each.name, each.env, each.stat], each.value, rel_tol=1e-6, abs_tol=1e-4)
    assert found.get(("train/trained_tokens", ALL, "value"), 0.0) == len(tokens)


def test_a_loss_that_is_not_a_number_is_not_left_out() -> None:
    table = MetricTable()
    add_metrics(table, {"train/loss": torch.tensor([1.0, math.nan]).double()}, torch.tensor([0, 0]), ENVS)
    assert all(math.isnan(each.value) for each in table.metrics() if each.stat in ("mean", "std"))


def test_masked_tokens_are_counted_and_the_effective_share_is_of_the_weights() -> None:
    values = {
        "train/masked_tokens": torch.tensor([1.0, 0.0, 1.0]).double(),
        "train/effective_share": torch.tensor([3.0, 0.0, 0.0]).double(),
    }
    table = MetricTable()
    add_metrics(table, values, torch.tensor([0, 0, 0]), ENVS[:1])
    found = {(each.name, each.stat): each.value for each in table.metrics() if each.env == ALL}
    assert found["train/masked_tokens", "value"] == 2.0
    assert math.isclose(found["train/effective_share", "value"], 1 / 3)
