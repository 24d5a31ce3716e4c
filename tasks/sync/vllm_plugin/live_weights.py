"""Whether a vLLM worker computes with the weights that it received: sums over the live model's weights.

The weights of each layer, live and received, are reduced to one sum over mixed words of their bytes. The sum does not depend
on the order of the words, so it is the same for separate and for merged matrices. Of a matrix only some columns are read, others
after each update. Layers whose layout this cannot read, such as quantized ones, are found out with the start model and left out.
"""

import re
from collections.abc import Iterator
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


class LiveWeights:
    """Compares the live model of a vLLM worker with the weights that the worker received.

    Call `note_start` before the first update, `begin` or `expect` for an update, and `find_differing` once they are in place.

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
        live = sum_live(model, expected.number)
        changed = (name for name in self._comparable or () if live.get(name) != expected.by_layer.get(name))
        return tuple(sorted({*changed, *find_stale_kernels(model, expected.number)}))

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
    for name, each in _read_live(model, number):
        _add_sum(sums, name, each)
    return sums


def find_stale_kernels(model: nn.Module, number: int) -> tuple[str, ...]:
    """Return the names of layers that compute with a packed copy that differs from the weights that they keep as well."""

    def is_stale(layer: nn.Module) -> bool:
        _, weight, _ = find_packed_kernel(layer)
        if weight is None or not weight.numel():
            return False
        return not torch.equal(_read_packed(layer, number), _select_columns(weight, number))

    return tuple(name for name, layer in model.named_modules() if is_stale(layer))


def _read_live(model: nn.Module, number: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, weights) of a model's parameters, and of those that a layer has only as a packed copy."""
    for name, each in model.named_parameters():
        if each.numel():
            yield name, _select_columns(each, number)
    for name, layer in model.named_modules():
        _, weight, _ = find_packed_kernel(layer)
        # A weight that is kept next to its packed copy was read above; `find_stale_kernels` compares the two.
        if weight is not None and not weight.numel():
            yield f"{name}.weight", _read_packed(layer, number)


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
