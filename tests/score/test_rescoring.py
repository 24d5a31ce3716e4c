"""What is left to score, by what is stored."""

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from rollmill.tasks.score.stored_scores import groups_to_score, scores_to_keep
from rollmill.tasks.store.rows import column_values

STATUSES = ("complete", "truncated", "failed", "cancelled")
COLUMNS = ("group", "sample", "trajectory_id", "status")


def rollouts(statuses: dict[tuple[int, int], str]) -> pa.RecordBatch:
    """Rows by (group, sample), in the order given."""
    rows = [(group, sample, f"{group}.{sample}", status) for (group, sample), status in statuses.items()]
    return pa.RecordBatch.from_pylist(
        [dict(zip(COLUMNS, row, strict=True)) for row in rows],
        schema=pa.schema(
            [
                ("group", pa.int64()),
                ("sample", pa.int32()),
                ("trajectory_id", pa.string()),
                ("status", pa.string()),
            ]
        ),
    )


def ids(groups: list[Any]) -> list[list[object]]:
    return [list(column_values(rows, "trajectory_id")) for rows in groups]


STORED = st.dictionaries(
    st.tuples(st.integers(0, 5), st.integers(0, 3)), st.sampled_from(STATUSES), max_size=24
)


def test_survivors_without_a_score_are_left_in_order_of_group_and_sample() -> None:
    rows = rollouts({(1, 1): "complete", (0, 2): "truncated", (1, 0): "complete", (0, 0): "failed"})

    assert ids(groups_to_score(rows, {"1.0"}, whole=None)) == [["0.2"], ["1.1"]]


def test_a_scorer_of_groups_is_shown_groups_that_are_done_and_that_it_has_not_seen() -> None:
    rows = rollouts({(group, sample): "complete" for group in range(4) for sample in range(2)})

    left = groups_to_score(rows, {"2.1"}, whole={0: 2, 2: 2, 3: 2})

    assert ids(left) == [["0.0", "0.1"], ["3.0", "3.1"]]


def test_a_group_that_must_be_whole_and_is_not_is_not_shown() -> None:
    rows = rollouts({(0, 0): "complete", (0, 1): "failed", (1, 0): "complete", (1, 1): "complete"})

    assert ids(groups_to_score(rows, (), whole={0: 2, 1: 2})) == [["1.0", "1.1"]]


@given(stored=STORED, n_before_kill=st.integers(0, 6), by_group=st.booleans())
def test_a_rescoring_killed_after_any_group_and_resumed_scores_every_survivor_once(
    stored: dict[tuple[int, int], str], n_before_kill: int, by_group: bool
) -> None:
    rows, whole = rollouts(stored), {group: 0 for group, _ in stored} if by_group else None
    scored: list[object] = []
    for groups in ids(groups_to_score(rows, (), whole=whole))[:n_before_kill]:
        scored += groups
    for groups in ids(groups_to_score(rows, scored, whole=whole)):
        scored += groups

    survivors = [f"{group}.{sample}" for (group, sample), status in stored.items() if status in STATUSES[:2]]
    assert sorted(map(str, scored)) == sorted(survivors)
    assert not groups_to_score(rows, scored, whole=whole)


def scores(given: dict[tuple[int, int], str]) -> pa.RecordBatch:
    """Rows of scores by (group, sample): their statuses."""
    return rollouts(given)


def test_a_group_with_a_survivor_sampled_after_scoring_is_scored_again() -> None:
    rows = rollouts({(group, sample): "complete" for group in range(3) for sample in range(2)})
    stored = scores({(0, 0): "scored", (0, 1): "scored", (1, 0): "scored", (2, 0): "scored"})

    stay = scores_to_keep(rows, stored, whole={0, 1})
    left = groups_to_score(rows, column_values(stay, "trajectory_id"), whole={0: 0, 1: 0})

    assert list(column_values(stay, "trajectory_id")) == ["0.0", "0.1", "2.0"]
    assert ids(left) == [["1.0", "1.1"]]
    assert scores_to_keep(rows, stored, whole=None).equals(stored)


def test_failed_scores_are_replaced_when_retries_are_asked_for() -> None:
    rows = rollouts({(0, 0): "complete", (0, 1): "complete", (1, 0): "complete"})
    stored = scores({(0, 0): "failed", (0, 1): "scored", (1, 0): "scored"})

    alone = scores_to_keep(rows, stored, whole=None, redo_failed=True)
    together = scores_to_keep(rows, stored, whole={0, 1}, redo_failed=True)

    assert list(column_values(alone, "trajectory_id")) == ["0.1", "1.0"]
    assert list(column_values(together, "trajectory_id")) == ["1.0"]
    assert scores_to_keep(rows, stored, whole={0, 1}).equals(stored)
