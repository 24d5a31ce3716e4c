"""Packed sequences: rows one after another without padding, and the attention that keeps them apart."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.train.packing.prefixes import PrefixGroup

ATTENTION = "rollmill_varlen"
"""Name under which the attention is registered in transformers."""
_UNKNOWN = ("softcap", "s_aux", "position_bias", "cache")
"""Arguments that some models pass to their attention, and this one does not implement."""


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """M rows packed into one sequence of T tokens, where a shared prefix is stored once.

    Written out for each row, prefixes included, the rows have E tokens.

    Attributes:
        position_ids: [1, T] int64, each token's index in its row.
        lengths: [M] tokens of each row written out, longest first.
        cu_seqlens: [M + 1] int32, indices among the E tokens at which rows begin and end.
        expanded: [E] int64, positions of the rows' tokens in the packed sequence, row by row; None when nothing is shared.
        first: [T] int64, index of each packed token's first occurrence among the E; None when nothing is shared.

    Example: rows [a b c d] and [a b e] that share two tokens are packed as [a b c d e], expanded by
        [0 1 2 3 0 1 4], and the packed tokens come first at [0 1 2 3 6].
    """

    position_ids: torch.Tensor
    lengths: list[int]
    cu_seqlens: torch.Tensor
    expanded: torch.Tensor | None
    first: torch.Tensor | None


def sequence_positions(units: list[PrefixGroup]) -> dict[int, np.ndarray]:
    """Positions of each row's tokens in the packed sequence, by row number."""
    places, end = {}, 0
    for unit in units:
        shared = np.arange(end, end + unit.shared)
        end += unit.shared
        for row, length in zip(unit.rows, unit.lengths, strict=True):
            places[row] = np.concatenate([shared, np.arange(end, end + length - unit.shared)])
            end += length - unit.shared
    return places


def build_sequence(places: list[np.ndarray], device: torch.device) -> PackedSequence:
    """Build the PackedSequence of rows from the positions of each row's tokens in it."""
    # Longest first: equal lengths are adjacent, and lengths[0] is the longest for the kernel.
    ordered = sorted(places, key=len, reverse=True)
    expanded = np.concatenate(ordered)
    lengths = [len(each) for each in ordered]
    _, first = np.unique(expanded, return_index=True)
    positions = np.concatenate([np.arange(length) for length in lengths])[first]
    # Without shared tokens nothing has to be expanded, which spares two copies in each layer.
    is_plain = np.array_equal(expanded, np.arange(len(first)))

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device)

    return PackedSequence(
        position_ids=tensor(positions).unsqueeze(0),
        lengths=lengths,
        cu_seqlens=tensor(np.cumsum([0, *lengths])).to(torch.int32),
        expanded=None if is_plain else tensor(expanded),
        first=None if is_plain else tensor(first),
    )


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: PackedSequence | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each row of a packed sequence, with the signature that transformers calls.

    Args:
        module: the attention layer.
        query: [1, heads, T, width] queries.
        key: [1, key heads, T, width] keys.
        value: [1, key heads, T, width] values.
        attention_mask: must be None; the packed sequence has the rows' bounds.
        packed: the packed sequence that the model's `forward` was given.
        scaling: factor of the scores; None: 1 / sqrt(width).
        sliding_window: largest number of tokens that a token attends to, itself included; None: itself and all before it.
        others: further arguments that transformers passes.

    Returns:
        [1, T, heads, width] attention output, and None for the attention weights.

    Raises:
        ConfigError: the model passes an argument that this attention does not implement.
    """
    unknown = [name for name in _UNKNOWN if others.get(name) is not None]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if packed is None or unknown:
        what = (
            "its layers do not get the rows' boundaries"
            if packed is None
            else "its layers ask for " + ", ".join(unknown)
        )
        raise ConfigError(
            "train.layout", "varlen", f"not for {type(module).__name__}: {what}; set it to padded"
        )
    tokens = [each[0].transpose(0, 1) for each in (query, key, value)]
    if packed.expanded is not None:
        tokens = [each.index_select(0, packed.expanded) for each in tokens]
    # torch's varlen kernel exists for CUDA, and for meta tensors, which have shapes only.
    kernel = _attend_by_length if query.device.type == "cpu" else _attend_by_kernel
    found = kernel(tokens, packed, scaling, sliding_window)
    if packed.first is not None:
        found = found.index_select(0, packed.first)
    return found.unsqueeze(0), None


def _attend_by_kernel(
    tokens: list[torch.Tensor], packed: PackedSequence, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Compute the [E, heads, width] attention of all rows in one call of torch's varlen kernel."""
    query, key, value = tokens
    found = varlen_attn(
        query,
        key,
        value,
        packed.cu_seqlens,
        packed.cu_seqlens,
        packed.lengths[0],
        packed.lengths[0],
        scale=scaling,
        # transformers counts the token itself in its window, torch does not; 0 to the right makes it causal.
        window_size=(window - 1 if window else -1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return cast("torch.Tensor", found)


def _attend_by_length(
    tokens: list[torch.Tensor], packed: PackedSequence, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Compute the [E, heads, width] attention of all rows, one call for each run of rows of equal length."""
    runs = [(length, len(list(run))) for length, run in groupby(packed.lengths)]
    parts = [each.split([length * n_rows for length, n_rows in runs]) for each in tokens]
    found = []
    for (length, n_rows), *run in zip(runs, *parts, strict=True):
        query, key, value = (each.unflatten(0, (n_rows, length)).transpose(1, 2) for each in run)
        mask = _band(length, window, query.device) if window and window < length else None
        output = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        found.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(found)


def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Return the [length, length] mask of sliding-window attention: True for a token itself and the window - 1 before it."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril() & ones.triu(1 - window)


AttentionInterface.register(ATTENTION, varlen_attention)
