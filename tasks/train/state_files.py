"""A trainer's state in safetensors files, one a rank, that any number of ranks can read.

A file has for each of its parameter ranges the tensors weight/NAME, exp_avg/NAME and exp_avg_sq/NAME, [numbers] in
single precision; and in its metadata, under "parameters", JSON: {NAME: {"shape", "start", "updates"}}. `start` is the
place of the range in the flat parameter. Every number of every parameter is in one file.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tasks.errors import StoreError
from tasks.train.state import KINDS, OptimizerState, Part

SUFFIX = ".safetensors"
_PARAMETERS = "parameters"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A rank's part of the state, in memory of its own.

    Attributes:
        tensors: by their names in the file, on the CPU.
        parameters: what the file says of each range.
    """

    tensors: dict[str, torch.Tensor]
    parameters: dict[str, dict[str, Any]]

    @classmethod
    def take(cls, state: OptimizerState, parts: list[Part], others: Mapping[str, torch.Tensor]) -> Self:
        """Copy parts of a state, and other tensors beside them.

        It takes 12 bytes a number: page-locked memory where the state is on a GPU, so that the copies run together.
        """
        tensors = {
            f"{kind}/{part.name}": _copied(state.tensor(kind, part)) for part in parts for kind in KINDS
        }
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        parameters = {
            part.name: {"shape": part.shape, "start": part.start, "updates": state.n_updates(part)}
            for part in parts
        }
        return cls(tensors | dict(others), parameters)

    def write(self, path: Path) -> None:
        """Make a file of it.

        Raises:
            StoreError: the disk does not take it; names the file and what to do.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(self.tensors, path, metadata={_PARAMETERS: json.dumps(self.parameters)})
        except (OSError, SafetensorError) as error:
            remedy = "make room, or let this user write there; the last complete checkpoint is as it was"
            raise StoreError(f"cannot write {path}: {error}; {remedy}") from error


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor.clone(memory_format=torch.contiguous_format)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Range:
    start: int
    end: int
    file: Any


class StateFiles:
    """The files of a state, opened; a context manager.

    Args:
        folder: where they lie.
        pattern: of their names; all by default.

    Attributes:
        shapes: of every parameter, by name.
        n_updates: how often the optimizer has moved each parameter.
    """

    def __init__(self, folder: Path, pattern: str = f"*{SUFFIX}") -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.n_updates: dict[str, int] = {}
        self._folder, self._pattern, self._open = folder, pattern, ExitStack()
        self._ranges: dict[str, list[_Range]] = {}
        self._others: dict[str, Any] = {}

    def __enter__(self) -> Self:
        """Read what the files say of themselves; StoreError when one cannot be read."""
        with ExitStack() as opened:
            for path in sorted(self._folder.glob(self._pattern)):
                try:
                    self._add(opened.enter_context(safe_open(path, framework="pt")))
                except (OSError, ValueError, KeyError, SafetensorError) as error:
                    raise StoreError(f"checkpoint {self._folder} is damaged: {path}: {error}") from error
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def read(self, kind: str, name: str, start: int, size: int) -> torch.Tensor:
        """[size] numbers of a flat parameter's weights, or of a moment, from `start` on.

        Raises:
            StoreError: the files do not have all of them.
        """
        end, found = start + size, torch.empty(size)
        n_found = 0
        for each in self._ranges.get(name, ()):
            first, last = max(start, each.start), min(end, each.end)
            if first < last:
                stored = each.file.get_slice(f"{kind}/{name}")[first - each.start : last - each.start]
                found[first - start : last - start] = stored
                n_found += last - first
        if n_found != size:
            raise StoreError(
                f"checkpoint {self._folder} has {n_found} of the {size} numbers of {kind}/{name} from {start} on"
            )
        return found

    def read_other(self, name: str) -> torch.Tensor | None:
        """A tensor that is of no parameter; None when there is none of that name."""
        file = self._others.get(name)
        return None if file is None else file.get_tensor(name)

    def _add(self, file: Any) -> None:
        parameters = json.loads((file.metadata() or {})[_PARAMETERS])
        for name, told in parameters.items():
            size = file.get_slice(f"{KINDS[0]}/{name}").get_shape()[0]
            self.shapes[name] = tuple(told["shape"])
            self.n_updates[name] = max(told["updates"], self.n_updates.get(name, 0))
            self._ranges.setdefault(name, []).append(_Range(told["start"], told["start"] + size, file))
        of_parameters = {f"{kind}/{name}" for kind in KINDS for name in parameters}
        self._others |= {name: file for name in file.keys() if name not in of_parameters}  # noqa: SIM118 - not a dict


def restore(state: OptimizerState, files: StateFiles) -> None:
    """Give a rank what it holds of a stored state; a collective.

    Raises:
        StoreError: it is of another model, or trains other parameters.
    """
    check_parameters(files.shapes, state.shapes)
    parts = state.parts()
    for part in parts:
        state.begin_moments(part, files.n_updates[part.name])
        for kind in KINDS:
            state.tensor(kind, part).copy_(files.read(kind, part.name, part.start, part.size))
    state.publish()


def check_parameters(stored: Mapping[str, tuple[int, ...]], trained: Mapping[str, tuple[int, ...]]) -> None:
    """Raises StoreError, which names the first difference, unless both are the same names and shapes."""
    for name in sorted(stored.keys() | trained.keys()):
        there, here = stored.get(name), trained.get(name)
        if there != here:
            raise StoreError(
                f"the checkpoint is of another model: parameter {name} has the shape {there or 'of none'} in it, and "
                f"{here or 'is not trained'} here; give the model and the settings that the run was begun with"
            )
