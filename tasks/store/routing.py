"""Which experts each token of a trajectory was routed to: the bulk of a mixture of experts' rollouts.

A row is handed to the writer just before its rollout, and is stored before it: a kill in between leaves a row without a
rollout, whose trajectory is sampled again under the same id. Of rows with one id the last counts.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from tasks.errors import ShardError
from tasks.store.filesystem import Files
from tasks.store.findings import named
from tasks.store.layout import RunFolder
from tasks.store.reader import read
from tasks.store.rows import Rows
from tasks.store.schemas import schema_of


def routing_row(run: str, step: int, trajectory_id: str, parts: Sequence[np.ndarray]) -> Rows:
    """The routed experts of one trajectory as a row that wraps their bytes.

    Args:
        run: id of the run.
        step: of the rollout.
        trajectory_id: of the rollout.
        parts: [N, layers, experts a token] each, one after another; a single one is not copied, unless it is in
            another order than C, or its elements in another than little-endian.
    """
    experts = parts[0] if len(parts) == 1 else np.concatenate(parts)
    experts = np.ascontiguousarray(experts, experts.dtype.newbyteorder("<"))
    offsets = np.array([0, experts.nbytes], np.int64)
    value = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(experts.reshape(-1).view(np.uint8))]
    )
    schema = schema_of("routing")
    values = {"run": run, "step": step, "trajectory_id": trajectory_id, "dtype": experts.dtype.name}
    values |= {"shape": list(experts.shape)}
    arrays = [
        value if each.name == "experts" else pa.array([values[each.name]], each.type) for each in schema
    ]
    return pa.record_batch(arrays, schema=schema)


def read_routing(folder: RunFolder, step: int, ids: Sequence[str]) -> list[np.ndarray]:
    """[N, layers, experts a token] of each trajectory of a step; on a local disk views on the mapped shards.

    Row i is of token i; the last token of a trajectory has none, nor have tokens that it ended before computing.

    Raises:
        ShardError: some have no row: they were not kept, or are of a step beyond store.keep_routing_steps.
    """
    stored = read(folder, "routing", ["trajectory_id", "shape", "dtype", "experts"], step=step)
    places = {trajectory: place for place, trajectory in enumerate(stored["trajectory_id"].to_pylist())}
    if missing := [each for each in ids if each not in places]:
        raise ShardError(
            f"{folder.dataset('routing', step=step)} has the routed experts of {len(ids) - len(missing)} of {len(ids)} "
            f"trajectories; missing are {named(missing)}: is rollout.keep_routing on, and store.keep_routing_steps large enough?"
        )
    return [_experts(stored, places[each]) for each in ids]


def _experts(stored: pa.Table, place: int) -> np.ndarray:
    value, dtype = stored["experts"][place].as_buffer(), np.dtype(stored["dtype"][place].as_py())
    return np.frombuffer(value, dtype.newbyteorder("<")).reshape(stored["shape"][place].as_py())


def expired_steps(stored: Sequence[int], *, done: int, checkpoint: int, keep: int) -> list[int]:
    """The steps whose routed experts may go.

    Args:
        stored: steps that have some.
        done: steps that are trained, 0 to done - 1.
        checkpoint: version of the last complete checkpoint: the steps from it on are trained again after a kill.
        keep: most steps to keep of those that are trained; 0: all.

    Example: of the steps 0 to 7, with 6 trained, the checkpoint of version 5 and 2 to keep, these are 0 to 3.
    """
    if not keep:
        return []
    return [step for step in stored if step < min(done - keep, checkpoint)]


def expired_routing(files: Files, *, done: int, checkpoint: int, keep: int) -> list[str]:
    """The shards with the routed experts of steps that may go; see `expired_steps`."""
    shards: dict[int, list[str]] = {}
    for key in files.keys("routing/step=*/*.arrow"):
        shards.setdefault(int(key.split("/")[1].removeprefix("step=")), []).append(key)
    expired = expired_steps(sorted(shards), done=done, checkpoint=checkpoint, keep=keep)
    return [key for step in expired for key in shards[step]]
