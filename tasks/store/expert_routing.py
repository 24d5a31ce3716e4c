"""The experts that each token of a trajectory was routed to: most of the bytes of a mixture of experts' rollouts.

A row is stored before its rollout. A kill in between leaves a row without a rollout, whose trajectory is sampled again
under the same id. Of several rows with one id the last one counts.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from rollmill.tasks.errors import ShardError
from rollmill.tasks.store.filesystem import Files
from rollmill.tasks.store.folders import RunFolder, step_from_key
from rollmill.tasks.store.reader import read_chosen
from rollmill.tasks.store.rows import Rows, name_first
from rollmill.tasks.store.schemas import dataset_schema


def make_routing_row(run: str, step: int, trajectory_id: str, parts: Sequence[np.ndarray]) -> Rows:
    """Build the row of `routing` with one trajectory's routed experts.

    `parts` are [N, layers, experts per token] each, in token order; a single little-endian array in C order is not copied.
    """
    experts = parts[0] if len(parts) == 1 else np.concatenate(parts)
    experts = np.ascontiguousarray(experts, experts.dtype.newbyteorder("<"))
    offsets = np.array([0, experts.nbytes], np.int64)
    value = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(experts.reshape(-1).view(np.uint8))]
    )
    schema = dataset_schema("routing")
    values = {"run": run, "step": step, "trajectory_id": trajectory_id, "dtype": experts.dtype.name}
    values |= {"shape": list(experts.shape)}
    arrays = [
        value if each.name == "experts" else pa.array([values[each.name]], each.type) for each in schema
    ]
    return pa.record_batch(arrays, schema=schema)


def read_routing(folder: RunFolder, step: int, ids: Sequence[str]) -> list[np.ndarray]:
    """Read the routed experts of trajectories of a step: for each id [N, layers, experts per token], row i for token i.

    The arrays have the stored integer type, such as uint8. The last token of a trajectory has no row, nor have tokens that were
    never computed. On a local disk the arrays are read-only views of the mapped shards.

    Raises:
        ShardError: some trajectories have none stored: they were not kept, or store.keep_routing_steps removed them.
    """
    stored = read_chosen(folder, "routing", ids, ["trajectory_id", "shape", "dtype", "experts"], step=step)
    # Of several rows with one id, which a kill may leave, the last one counts.
    places = {trajectory: place for place, trajectory in enumerate(stored["trajectory_id"].to_pylist())}
    if missing := [each for each in ids if each not in places]:
        raise ShardError(
            f"{folder.dataset('routing', step=step)} has the routed experts of {len(ids) - len(missing)} of {len(ids)} "
            f"trajectories; missing are {name_first(missing)}: is rollout.keep_routing on, and store.keep_routing_steps large enough?"
        )
    found = []
    for place in (places[each] for each in ids):
        value, dtype = stored["experts"][place].as_buffer(), np.dtype(stored["dtype"][place].as_py())
        found.append(np.frombuffer(value, dtype.newbyteorder("<")).reshape(stored["shape"][place].as_py()))
    return found


def select_expired_steps(stored: Sequence[int], *, done: int, checkpoint: int, keep: int) -> list[int]:
    """Return the steps, of those in `stored`, whose routed experts may be removed.

    The first `done` steps are trained. Kept are the last `keep` of them (0: all), and the steps from the version `checkpoint` of the
    last complete checkpoint on, which are trained again after a kill.

    Example: of the steps 0 to 7, with done=6, checkpoint=5 and keep=2, the steps 0 to 3 are returned.
    """
    if not keep:
        return []
    return [step for step in stored if step < min(done - keep, checkpoint)]


def list_expired_routing(files: Files, *, done: int, checkpoint: int, keep: int) -> list[str]:
    """List the keys of the shards with routed experts that may be removed; arguments as for `select_expired_steps`."""
    shards: dict[int, list[str]] = {}
    for key in files.keys("routing/step=*/*.arrow"):
        if (step := step_from_key(key)) is not None:
            shards.setdefault(step, []).append(key)
    expired = select_expired_steps(sorted(shards), done=done, checkpoint=checkpoint, keep=keep)
    return [key for step in expired for key in shards[step]]
