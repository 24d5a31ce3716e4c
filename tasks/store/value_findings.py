"""What is wrong with the values of rollouts, token by token."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.store.findings import Finding, named

COLUMNS = (
    "trajectory_id",
    "token_ids",
    "loss_mask",
    "logprobs",
    "version_span_starts",
    "version_span_versions",
    "n_completion_tokens",
)
_REMEDY = "keep these out of training: leave them out of any batch; report it, since Rollmill wrote them"


def value_findings(where: str, rows: pa.Table) -> list[Finding]:
    """Check rows of `rollouts`, their COLUMNS.

    loss_mask and logprobs are as long as token_ids; logprobs are finite where the mask is True and NaN elsewhere;
    n_completion_tokens is the number of True ones; spans have a start and a version each, and ascend within the tokens.
    """
    ids = rows["trajectory_id"].to_numpy()
    return [
        Finding(where, f"{what}: {named(ids[is_wrong])}", _REMEDY)
        for what, is_wrong in _checks(rows)
        if is_wrong.any()
    ]


def _checks(rows: pa.Table) -> Iterator[tuple[str, np.ndarray]]:
    """What may be wrong, and of which rows it is."""
    n_tokens = _lengths(rows, "token_ids")
    is_uneven = (_lengths(rows, "loss_mask") != n_tokens) | (_lengths(rows, "logprobs") != n_tokens)
    yield "token_ids, loss_mask and logprobs differ in length", is_uneven
    even = rows.filter(pa.array(~is_uneven))
    mask, logprobs = _flat(even, "loss_mask").astype(bool), _flat(even, "logprobs")
    row_of_token = np.repeat(np.flatnonzero(~is_uneven), n_tokens[~is_uneven])

    def rows_with(is_wrong: np.ndarray) -> np.ndarray:
        return np.bincount(row_of_token[is_wrong], minlength=rows.num_rows) > 0

    yield "logprobs of sampled tokens are not finite", rows_with(mask & ~np.isfinite(logprobs))
    yield "logprobs of tokens that were not sampled are not NaN", rows_with(~mask & ~np.isnan(logprobs))
    n_sampled = np.bincount(row_of_token[mask], minlength=rows.num_rows)
    n_told = rows["n_completion_tokens"].to_numpy()
    yield "n_completion_tokens is not the number of True in loss_mask", ~is_uneven & (n_sampled != n_told)
    yield "spans of policy versions are not in order within the tokens", _wrong_spans(rows, n_tokens)


def _wrong_spans(rows: pa.Table, n_tokens: np.ndarray) -> np.ndarray:
    n_spans = _lengths(rows, "version_span_starts")
    is_wrong: np.ndarray = n_spans != _lengths(rows, "version_span_versions")
    starts, row = _flat(rows, "version_span_starts"), np.repeat(np.arange(rows.num_rows), n_spans)
    is_outside = (starts < 0) | (starts >= n_tokens[row])
    descends = (row[1:] == row[:-1]) & (starts[1:] <= starts[:-1])
    is_wrong[row[is_outside]] = True
    is_wrong[row[1:][descends]] = True
    return is_wrong


def _lengths(rows: pa.Table, column: str) -> np.ndarray:
    return np.asarray(pc.list_value_length(rows[column]).to_numpy(), np.int64)


def _flat(rows: pa.Table, column: str) -> np.ndarray:
    return np.asarray(pc.list_flatten(rows[column]).to_numpy())
