"""The corpus of a start model: token ids and loss mask, one row an example."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather

from tasks.store.schemas import ragged

SCHEMA = pa.schema(
    [
        pa.field("token_ids", pa.large_list(pa.int32()), metadata={"meaning": "[T] prompt and answer"}),
        pa.field("loss_mask", pa.large_list(pa.bool_()), metadata={"meaning": "[T] True on tokens to learn"}),
    ]
)


def write_corpus(path: Path, token_ids: Sequence[np.ndarray], loss_masks: Sequence[np.ndarray]) -> None:
    """Write examples as one Arrow IPC file."""
    columns = [
        ragged(list(token_ids), SCHEMA.field("token_ids").type),
        ragged(list(loss_masks), SCHEMA.field("loss_mask").type),
    ]
    feather.write_feather(pa.table(columns, schema=SCHEMA), path, compression="uncompressed")
