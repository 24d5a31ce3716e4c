"""What is wrong with values by token that lie beside rollouts: log-probabilities of other policies, annotations."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from tasks.store.findings import Finding, named

_REMEDY = (
    "restore the shard from a copy, or move it out of the run: what trains on them next computes them anew"
)
_LISTS = ("logprobs", "entropy", "ratio", "clipped")


def token_findings(where: str, rollouts: pa.Table, rows: pa.Table) -> list[Finding]:
    """Check rows by token of trajectories that are among a step's rollouts.

    Each of their lists is as long as token_ids; logprobs are finite where loss_mask is True, and NaN elsewhere.

    Args:
        where: the rows' folder.
        rollouts: trajectory_id and loss_mask.
        rows: trajectory_id, and those of logprobs, entropy, ratio and clipped that the data set has.
    """
    masks = dict(zip(rollouts["trajectory_id"].to_pylist(), rollouts["loss_mask"], strict=True))
    ids = rows["trajectory_id"].to_pylist()
    places = [place for place, name in enumerate(ids) if name in masks]
    found: dict[str, list[str]] = {}
    for place in places:
        mask = masks[ids[place]].values.to_numpy(zero_copy_only=False)
        for wrong in _wrong(
            mask, {name: rows[name][place].values for name in _LISTS if name in rows.column_names}
        ):
            found.setdefault(wrong, []).append(ids[place])
    return [Finding(where, f"{what}: {named(names)}", _REMEDY) for what, names in found.items()]


def _wrong(mask: np.ndarray, lists: dict[str, pa.Array]) -> Iterator[str]:
    if any(len(each) != len(mask) for each in lists.values()):
        yield "values by token are not as many as token_ids"
        return
    logprobs = lists["logprobs"].to_numpy(zero_copy_only=False)
    if not np.isfinite(logprobs[mask]).all():
        yield "logprobs of sampled tokens are not finite"
    if not np.isnan(logprobs[~mask]).all():
        yield "logprobs of tokens that were not sampled are not NaN"
