"""The training examples of a start model: token ids and loss mask, one row per example."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather

from rollmill.tasks.store.schemas import ragged_array

WARMUP_SCHEMA = pa.schema(
    [
        pa.field("token_ids", pa.large_list(pa.int32()), metadata={"meaning": "[T] prompt and answer"}),
        pa.field("loss_mask", pa.large_list(pa.bool_()), metadata={"meaning": "[T] True on tokens to learn"}),
    ]
)


def write_warmup_text(path: Path, token_ids: Sequence[np.ndarray], loss_masks: Sequence[np.ndarray]) -> None:
    """Write training examples, each an array of token ids and one of its loss mask, as one Arrow IPC file."""
    columns = [
        ragged_array(list(token_ids), WARMUP_SCHEMA.field("token_ids").type),
        ragged_array(list(loss_masks), WARMUP_SCHEMA.field("loss_mask").type),
    ]
    feather.write_feather(pa.table(columns, schema=WARMUP_SCHEMA), path, compression="uncompressed")
