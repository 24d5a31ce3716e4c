"""A trainer's state in safetensors files, one a rank, that any number of ranks can read.

A file has for each of its parameter ranges the tensors weight/NAME, exp_avg/NAME and exp_avg_sq/NAME, [numbers] in
single precision; and in its metadata, under "parameters", JSON: {NAME: {"shape", "start", "updates"}}. `start` is the
place of the range in the flat parameter. Every number of every parameter is in one file.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rollmill.tasks.errors import StoreError
from rollmill.tasks.sync.ranges import overlap
from rollmill.tasks.train.engine.optimizer_state import KINDS, OptimizerState, ParameterRange

SUFFIX = ".safetensors"
_PARAMETERS = "parameters"


def copy_state(state: OptimizerState, parts: list[ParameterRange]) -> tuple[dict[str, torch.Tensor], str]:
    """Copy ranges of parameters' weights and moments into host memory, as the content of a checkpoint file.

    Returns:
        [numbers] tensors by their names in the file (weight/NAME, exp_avg/NAME, exp_avg_sq/NAME), and, for its
        metadata, the JSON of the ranges' shapes, starts and counts of updates.
    """
    tensors = {}
    for part in parts:
        for kind in KINDS:
            held = state.tensor(kind, part)
            # Page-locked memory, so that the copies from a GPU run at the same time; it takes 12 bytes a number.
            copy = torch.empty(held.shape, dtype=held.dtype, pin_memory=held.is_cuda)
            tensors[f"{kind}/{part.name}"] = copy.copy_(held, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    parameters = {
        part.name: {"shape": part.shape, "start": part.start, "updates": state.n_updates(part)}
        for part in parts
    }
    return tensors, json.dumps(parameters)


def write_state(path: Path, tensors: Mapping[str, torch.Tensor], parameters: str) -> None:
    """Write tensors, and the JSON of their parameters as metadata, into a safetensors file.

    Raises:
        StoreError: the file cannot be written; names it and what to do.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), path, metadata={_PARAMETERS: parameters})
    except (OSError, SafetensorError) as error:
        remedy = "make room, or let this user write there; the last complete checkpoint is as it was"
        raise StoreError(f"cannot write {path}: {error}; {remedy}") from error


class StateFiles:
    """Context manager that reads a trainer's state from the safetensors files of all ranks that wrote it.

    Args:
        folder: folder of the files.
        pattern: glob pattern of the files' names; by default all safetensors files.

    Attributes:
        shapes: shape of every stored parameter, by name.
        n_updates: number of optimizer updates of each parameter, by name.
    """

    def __init__(self, folder: Path, pattern: str = f"*{SUFFIX}") -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.n_updates: dict[str, int] = {}
        self._folder, self._pattern, self._open = folder, pattern, ExitStack()
        # (first number, end, file) of each stored range of a parameter.
        self._ranges: dict[str, list[tuple[int, int, Any]]] = {}
        self._others: dict[str, Any] = {}

    def __enter__(self) -> Self:
        """Open the files and read their metadata; raises StoreError for one that cannot be read."""
        with ExitStack() as opened:
            for path in sorted(self._folder.glob(self._pattern)):
                try:
                    self._add(opened.enter_context(safe_open(path, framework="pt")))
                except (OSError, ValueError, KeyError, SafetensorError) as error:
                    raise StoreError(f"checkpoint {self._folder} is damaged: {path}: {error}") from error
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def read(self, kind: str, name: str, start: int, size: int) -> torch.Tensor:
        """Return `size` numbers of a flattened parameter's weights, or of one of its moments, from number `start` on.

        Args:
            kind: "weight", "exp_avg" or "exp_avg_sq".
            name: name of the parameter.
            start: first number.
            size: how many numbers.

        Raises:
            StoreError: the files do not have all of these numbers.
        """
        found = torch.empty(size)
        n_found = 0
        for stored_first, stored_end, file in self._ranges.get(name, ()):
            first, end = overlap((start, start + size), (stored_first, stored_end))
            if first < end:
                # Only the needed numbers are read: a rank of many reads a fraction of each file.
                stored = file.get_slice(f"{kind}/{name}")[first - stored_first : end - stored_first]
                found[first - start : end - start] = stored
                n_found += end - first
        if n_found != size:
            raise StoreError(
                f"checkpoint {self._folder} has {n_found} of the {size} numbers of {kind}/{name} from {start} on"
            )
        return found

    def read_other(self, name: str) -> torch.Tensor | None:
        """Return a stored tensor that belongs to no parameter, such as a random generator's; None if there is none `name`."""
        file = self._others.get(name)
        return None if file is None else file.get_tensor(name)

    def _add(self, file: Any) -> None:
        parameters = json.loads((file.metadata() or {})[_PARAMETERS])
        for name, entry in parameters.items():
            size = file.get_slice(f"{KINDS[0]}/{name}").get_shape()[0]
            self.shapes[name] = tuple(entry["shape"])
            self.n_updates[name] = max(entry["updates"], self.n_updates.get(name, 0))
            self._ranges.setdefault(name, []).append((entry["start"], entry["start"] + size, file))
        of_parameters = {f"{kind}/{name}" for kind in KINDS for name in parameters}
        self._others |= {name: file for name in file.keys() if name not in of_parameters}  # noqa: SIM118 - not a dict


def restore_state(state: OptimizerState, files: StateFiles) -> None:
    """Load this rank's part of a stored state into the optimizer and the model; a collective.

    Raises:
        StoreError: the stored state is of another model, or of other trained parameters.
    """
    check_parameters(files.shapes, state.shapes)
    parts = state.parts()
    for part in parts:
        state.allocate_moments(part, files.n_updates[part.name])
        for kind in KINDS:
            state.tensor(kind, part).copy_(files.read(kind, part.name, part.start, part.size))
    state.publish()


def check_parameters(stored: Mapping[str, tuple[int, ...]], trained: Mapping[str, tuple[int, ...]]) -> None:
    """Raise StoreError, which names the first difference, unless both mappings have the same names and shapes."""
    for name in sorted(stored.keys() | trained.keys()):
        there, here = stored.get(name), trained.get(name)
        if there != here:
            raise StoreError(
                f"the checkpoint is of another model: parameter {name} has the shape {there or 'of none'} in it, and "
                f"{here or 'is not trained'} here; give the model and the settings that the run was started with"
            )
