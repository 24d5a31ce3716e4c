import math

import pytest

from rollmill.tasks.observe.metrics import ALL, Metric, MetricTable, Reduced


def test_mean_of_parts_is_weighted_by_their_counts() -> None:
    table = MetricTable()
    table.add("train/loss", Reduced("mean", 6.0, 2), "addition")
    table.add("train/loss", Reduced("mean", 0.0, 1), "countdown")

    assert table.metrics() == [
        Metric("train/loss", "addition", "mean", 3.0),
        Metric("train/loss", ALL, "mean", 2.0),
        Metric("train/loss", "countdown", "mean", 0.0),
    ]


def test_joined_tables_equal_one_table() -> None:
    parts = [(Reduced("max", 2.0), None), (Reduced("max", 7.0), None), (Reduced("max", 5.0), "addition")]
    whole, tables = MetricTable(), [MetricTable() for _ in parts]
    for table, (value, env) in zip(tables, parts, strict=True):
        whole.add("train/backward_s", value, env)
        table.add("train/backward_s", value, env)
    joined = MetricTable()
    joined.join(tables)

    assert joined.metrics() == whole.metrics()
    assert whole.metrics()[-1].value == 7.0


def test_values_add_up_and_a_mean_of_nothing_is_nan() -> None:
    assert Reduced("value", 2.0).join(Reduced("value", 3.0)).result == 5.0
    assert math.isnan(Reduced("mean", 0.0, 0).result)


def test_a_mean_is_not_joined_with_a_maximum() -> None:
    with pytest.raises(ValueError, match="cannot merge a max into a mean"):
        Reduced("mean", 1.0).join(Reduced("max", 1.0))


def test_a_distribution_is_reported_by_its_mean_deviation_and_extremes() -> None:
    table = MetricTable()
    table.add("train/ratio", Reduced("distribution", 2.0, 2, 2.0, 1.0, 1.0))
    table.add("train/ratio", Reduced("distribution", 4.0, 1, 16.0, 4.0, 4.0))

    assert [(each.stat, each.value) for each in table.metrics()] == [
        ("mean", 2.0),
        ("std", math.sqrt(2.0)),
        ("min", 1.0),
        ("max", 4.0),
    ]
