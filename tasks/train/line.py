"""Rows one after another in one line of tokens, without padding, and the attention that keeps them apart."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tasks.errors import ConfigError
from tasks.train.prefixes import Unit

ATTENTION = "rollmill_line"
"""The name that transformers knows the attention by."""
_UNKNOWN = ("softcap", "s_aux", "position_bias", "cache")
"""What some models ask of their attention, and this one does not do."""


@dataclass(frozen=True, slots=True)
class Line:
    """M rows in a line of T tokens; E tokens when what rows share is written out for each of them.

    Attributes:
        position_ids: [1, T] int64, each token's place in its row.
        lengths: [M] tokens of each row written out, longest first.
        boundaries: [M + 1] int32, where rows begin and end among the E tokens.
        written_out: [E] int64, places in the line, row by row; None when nothing is shared and E = T.
        first: [T] int64, where each token of the line stands first among the E; None likewise.

    Example: rows [a b c d] and [a b e] that share two tokens are the line [a b c d e], written out by
        [0 1 2 3 0 1 4], and the line's tokens stand first at [0 1 2 3 6].
    """

    position_ids: torch.Tensor
    lengths: list[int]
    boundaries: torch.Tensor
    written_out: torch.Tensor | None
    first: torch.Tensor | None


def line_places(units: list[Unit]) -> dict[int, np.ndarray]:
    """Places in the line of each row's tokens, by row number."""
    places, end = {}, 0
    for unit in units:
        shared = np.arange(end, end + unit.shared)
        end += unit.shared
        for row, length in zip(unit.rows, unit.lengths, strict=True):
            places[row] = np.concatenate([shared, np.arange(end, end + length - unit.shared)])
            end += length - unit.shared
    return places


def line_of(places: list[np.ndarray], device: torch.device) -> Line:
    """The line whose rows lie at `places`."""
    ordered = sorted(places, key=len, reverse=True)
    written_out = np.concatenate(ordered)
    lengths = [len(each) for each in ordered]
    _, first = np.unique(written_out, return_index=True)
    positions = np.concatenate([np.arange(length) for length in lengths])[first]
    is_plain = np.array_equal(written_out, np.arange(len(first)))

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device)

    return Line(
        position_ids=tensor(positions).unsqueeze(0),
        lengths=lengths,
        boundaries=tensor(np.cumsum([0, *lengths])).to(torch.int32),
        written_out=None if is_plain else tensor(written_out),
        first=None if is_plain else tensor(first),
    )


def line_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    line: Line | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **asked: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each row of a line, as transformers calls it for a layer.

    Args:
        module: the layer.
        query: [1, heads, T, width].
        key: [1, key heads, T, width].
        value: [1, key heads, T, width].
        attention_mask: none: the line says which rows there are.
        line: what `forward` of the model was given.
        scaling: of the scores; None: 1 / sqrt(width).
        sliding_window: most tokens that one sees, itself included; None: all before it.
        asked: the rest.

    Returns:
        [1, T, heads, width], and no weights.

    Raises:
        ConfigError: the model asks for what this attention does not do.
    """
    if (
        line is None
        or attention_mask is not None
        or (unknown := [name for name in _UNKNOWN if asked.get(name) is not None])
    ):
        what = (
            "its layers do not get the rows' boundaries"
            if line is None
            else "its layers ask for " + ", ".join(unknown)
        )
        raise ConfigError(
            "train.layout", "varlen", f"not for {type(module).__name__}: {what}; set it to padded"
        )
    tokens = [each[0].transpose(0, 1) for each in (query, key, value)]
    if line.written_out is not None:
        tokens = [each.index_select(0, line.written_out) for each in tokens]
    kernel = _by_kernel if query.is_cuda else _by_length
    found = kernel(tokens, line, scaling, sliding_window)
    if line.first is not None:
        found = found.index_select(0, line.first)
    return found.unsqueeze(0), None


def _by_kernel(
    tokens: list[torch.Tensor], line: Line, scaling: float | None, window: int | None
) -> torch.Tensor:
    """[E, heads, width], all rows in one call."""
    query, key, value = tokens
    found = varlen_attn(
        query,
        key,
        value,
        line.boundaries,
        line.boundaries,
        line.lengths[0],
        line.lengths[0],
        scale=scaling,
        window_size=(window - 1 if window else -1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return cast("torch.Tensor", found)


def _by_length(
    tokens: list[torch.Tensor], line: Line, scaling: float | None, window: int | None
) -> torch.Tensor:
    """[E, heads, width], rows of the same length in one call."""
    runs = [(length, len(list(run))) for length, run in groupby(line.lengths)]
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
    """[length, length] True where a token sees another: itself and the window - 1 before it."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril() & ones.triu(1 - window)


AttentionInterface.register(ATTENTION, line_attention)
