"""The digest of a batch."""

from collections.abc import Callable

import pyarrow as pa
import pytest

from rollmill.tasks.store.stored_batch import batch_digest

RowMaker = Callable[..., pa.RecordBatch]

BATCH = {
    "order": [0, 1],
    "trajectory_id": ["a", "b"],
    "advantage": [0.5, -0.5],
    "source": ["", ""],
    "source_step": [3, 3],
}


def test_a_batch_has_the_same_digest_in_any_order_and_any_pieces(rows: RowMaker) -> None:
    table = pa.table(rows("batches", 2, **BATCH))
    backwards = table.take([1, 0])
    assert batch_digest(backwards) == batch_digest(table)
    assert batch_digest(pa.concat_tables([table.slice(1), table.slice(0, 1)])) == batch_digest(table)
    assert batch_digest(table) == "5494c5f780b9e37b931777f507f61d531c64779bb32a4a669603c8006663a75e"


@pytest.mark.parametrize(
    "change",
    [
        {"order": [1, 0]},
        {"trajectory_id": ["ab", ""]},
        {"advantage": [0.5, -0.50000006]},
        {"source": ["", "runs/b"]},
        {"source_step": [3, 4]},
        {"token_advantages": [[0.5], [-0.5]]},
        {"token_advantages": [[0.5, -0.5], []]},
    ],
)
def test_a_batch_that_would_train_otherwise_has_another_digest(
    rows: RowMaker, change: dict[str, object]
) -> None:
    assert batch_digest(pa.table(rows("batches", 2, **BATCH | change))) != batch_digest(
        pa.table(rows("batches", 2, **BATCH))
    )


def test_columns_that_are_not_trained_on_do_not_change_the_digest(rows: RowMaker) -> None:
    other = rows("batches", 2, **BATCH, reward=[0.1, 0.2], run="other")
    assert batch_digest(pa.table(other)) == batch_digest(pa.table(rows("batches", 2, **BATCH)))


def test_an_empty_batch_has_a_digest(rows: RowMaker) -> None:
    assert len(batch_digest(pa.table(rows("batches", 0)))) == 64
