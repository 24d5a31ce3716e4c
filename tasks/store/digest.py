"""The digest of a batch: equal for equal batches, on every machine."""

import hashlib
import json

import numpy as np
import pyarrow as pa

_NUMBERS = {"order": "<i4", "advantage": "<f4", "source_step": "<i4"}
_TEXTS = ("trajectory_id", "source")


def batch_digest(rows: pa.Table) -> str:
    """SHA-256 of what the trainer trains on, 64 hex digits, whatever the order or the pieces the rows come in.

    It covers order, trajectory_id, advantage (to the bit), source and source_step, of rows of `batches`.
    """
    rows = rows.sort_by("order")
    digest = hashlib.sha256(f"{rows.num_rows} rows".encode())
    for name, kind in _NUMBERS.items():
        digest.update(np.asarray(rows[name].to_numpy(), kind).tobytes())
    for name in _TEXTS:
        digest.update(json.dumps(rows[name].to_pylist()).encode())
    return digest.hexdigest()
