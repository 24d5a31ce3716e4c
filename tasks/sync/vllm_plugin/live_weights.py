"""Whether a vLLM worker computes with the weights that it received: sums over the live model's weights.

The weights of each layer, live and received, are reduced to one sum over mixed words of their bytes. The sum does not depend
on the order of the words, so it is the same for separate and for merged matrices. Of a matrix only some columns are read, others
after each update. Layers whose layout this cannot read, such as quantized ones, are found out with the start model and left out.
"""

import math
import re
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollmill.tasks.sync.adapters import read_weights
from rollmill.tasks.sync.vllm_plugin.private_vllm import Weights, find_packed_kernel

N_COLUMNS = 64
"""Columns of each matrix that are read after an update."""

Sums = dict[str, int]
"""By layer: sum of mixed words, modulo 2^64."""

_LAYER = re.compile(r"layers\.\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class ExpectedSums:
    """The sums that a live model has once it computes with received weights; `add` each of them.

    Attributes:
        number: of the update; selects the columns of matrices.
        dtype: of the live model.
        by_layer: the sums.
    """

    number: int
    dtype: torch.dtype
    by_layer: Sums = field(default_factory=dict)

    def add(self, name: str, weight: torch.Tensor) -> None:
        """Add a received weight, as it is once cast to `dtype`."""
        _add_sum(self.by_layer, name, _select_columns(weight, self.number).to(self.dtype))


class Comparison:
    """A comparison of a model with an update's weights, a slice at a time; the model must not compute during a slice.

    Attributes:
        differing: names of the layers that differ; None: not known yet.
    """

    def __init__(self, work: Generator[None, None, tuple[str, ...]]) -> None:
        self._work = work
        self.differing: tuple[str, ...] | None = None

    def advance(self, limit_s: float = math.inf) -> bool:
        """Compare at least one tensor, and others until the end or until `limit_s` are over; return True at the end."""
        stop = time.perf_counter() + limit_s
        while self.differing is None:
            try:
                next(self._work)
            except StopIteration as end:
                self.differing = end.value
            if time.perf_counter() >= stop:
                break
        return self.differing is not None


class LiveWeights:
    """Compares the live model of a vLLM worker with the weights that the worker received.

    Call `note_start` before the first update, `begin` or `expect` for an update, and `find_differing` or `compare` once they are in place.

    Args:
        model_config: vLLM's `ModelConfig`; its model folder has the weights that the server started with.

    Attributes:
        uncompared: names of the layers that cannot be compared, sorted; known after the first `expect`.
    """

    def __init__(self, model_config: Any) -> None:
        self._folder, self._dtype = Path(model_config.model), model_config.dtype
        self._at_start: Sums | None = None
        self._comparable: set[str] | None = None
        self._number = 0
        self.uncompared: tuple[str, ...] = ()

    def note_start(self, model: nn.Module) -> None:
        """Keep the sums of the model that the server started with; the model must not compute meanwhile."""
        if self._at_start is None:
            self._at_start = sum_live(model, 0)

    def begin(self) -> ExpectedSums:
        """Return sums to which the weights of an update are added; may run in a thread while the model computes."""
        if self._comparable is None:
            self._compare_start()
        self._number += 1
        return ExpectedSums(self._number, self._dtype)

    def expect(self, weights: Weights) -> ExpectedSums:
        """Sum the weights of an update; may run in a thread while the model computes."""
        expected = self.begin()
        for name, each in weights:
            expected.add(name, each)
        return expected

    def find_differing(self, model: nn.Module, expected: ExpectedSums) -> tuple[str, ...]:
        """Return the names of a model's layers that differ from an update's weights; the model must not compute meanwhile.

        Layers that keep their weights next to a packed copy, and whose two differ, are named too.
        """
        comparison = self.compare(model, expected)
        comparison.advance()
        return comparison.differing or ()

    def compare(self, model: nn.Module, expected: ExpectedSums) -> Comparison:
        """Begin the comparison of `find_differing`, to be made in slices."""
        return Comparison(_compare(model, expected, self._comparable or set()))

    def _compare_start(self) -> None:
        """Find the layers that can be compared: those whose live sums were those of the stored start model."""
        live = self._at_start or {}
        stored: Sums = {}
        # A server that was started with the name of a hub has no folder that this can read.
        if self._folder.is_dir():
            stored = sum_stored(read_weights(str(self._folder)), self._dtype, 0)
        self._comparable = {name for name in live if live[name] == stored.get(name)}
        self.uncompared = tuple(sorted(live.keys() - self._comparable))


def sum_stored(weights: Weights, dtype: torch.dtype, number: int) -> Sums:
    """Cast weights to `dtype` and sum them by layer: whole vectors, and those columns of a matrix that `number` selects.

    `number` is that of the update, so that each update compares other columns.
    """
    sums = ExpectedSums(number, dtype)
    for name, each in weights:
        sums.add(name, each)
    return sums.by_layer


def sum_live(model: nn.Module, number: int) -> Sums:
    """Sum a vLLM model's weights by layer, as `sum_stored` does; the model must not compute meanwhile."""
    sums: Sums = {}
    for _ in _read_live(model, number, sums, set()):
        pass
    return sums


def _compare(
    model: nn.Module, expected: ExpectedSums, comparable: set[str]
) -> Generator[None, None, tuple[str, ...]]:
    sums: Sums = {}
    stale: set[str] = set()
    yield from _read_live(model, expected.number, sums, stale)
    changed = {name for name in comparable if sums.get(name) != expected.by_layer.get(name)}
    return tuple(sorted(changed | stale))


def _read_live(model: nn.Module, number: int, sums: Sums, stale: set[str]) -> Generator[None]:
    """Add up a model's weights by layer, and name layers whose packed copy differs from the weights that they keep as well.

    Yields after each tensor.
    """
    for name, each in model.named_parameters():
        if each.numel():
            _add_sum(sums, name, _select_columns(each, number))
            yield
    for name, layer in model.named_modules():
        _, weight, _ = find_packed_kernel(layer)
        if weight is None:
            continue
        packed = _read_packed(layer, number)
        if not weight.numel():
            _add_sum(sums, f"{name}.weight", packed)
        elif not torch.equal(packed, _select_columns(weight, number)):
            stale.add(name)
        yield


def _read_packed(layer: nn.Module, number: int) -> torch.Tensor:
    """Return the selected columns [out, n] of a linear layer's packed weights, exactly."""
    kernel, weight, width = find_packed_kernel(layer)
    assert kernel is not None
    assert weight is not None
    # A kernel cannot be read, but a row with a single 1 makes it return a column: every other product is 0.
    columns = _choose_columns(width, number)
    rows = torch.zeros(len(columns), width, dtype=weight.dtype)
    rows[:, columns.start : columns.stop].fill_diagonal_(1)
    return kernel(rows, weight, None).T


def _select_columns(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Return the columns of a matrix, or of a stack of matrices, that are read; vectors whole."""
    if tensor.dim() < 2:
        return tensor
    columns = _choose_columns(tensor.shape[-1], number)
    return tensor[..., columns.start : columns.stop]


def _choose_columns(width: int, number: int) -> range:
    """Choose at most N_COLUMNS consecutive columns of `width`, the next ones for each `number` in turn."""
    first = number * N_COLUMNS % (-(-width // N_COLUMNS) * N_COLUMNS)
    return range(first, min(first + N_COLUMNS, width))


def _add_sum(sums: Sums, name: str, weight: torch.Tensor) -> None:
    """Add a weight's words to the sum of its layer."""
    found = _LAYER.search(name)
    layer = found.group() if found else ".".join(name.split(".")[-2:])
    sums[layer] = (sums.get(layer, 0) + sum_words(weight.detach())) % 2**64


# Odd constants of MurmurHash3's finalizer, as signed 64-bit integers.
_FACTORS = (0xFF51AFD7ED558CCD - 2**64, 0xC4CEB9FE1A85EC53 - 2**64)
# 16 MiB of 64-bit words at a time.
_CHUNK_ROWS_WORDS = 1 << 21


def sum_words(tensor: torch.Tensor) -> int:
    """Sum the mixed words of a tensor's bytes, modulo 2^64; zeros of either sign count as nothing.

    The order of the words does not change the sum. Words are mixed as in MurmurHash3's finalizer, so that changes of several words
    do not cancel out.
    """
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = 0
    # Adding 0 turns -0 into 0.
    for part in tensor.reshape(-1).split(_CHUNK_ROWS_WORDS):
        words = (part + 0).view(kinds[part.element_size()]).to(torch.int64)
        for shift, factor in zip((33, 29), _FACTORS, strict=True):
            words = words * factor
            words = words ^ (words >> shift)
        total += int(words.sum())
    return total % 2**64
