"""Reads a step's batch on all ranks together, each stored row on one rank, and sends each row to the ranks that compute it.

Which rank computes a row depends on the lengths and prompts of all rows. So each rank reads an equal portion of the stored rows, all
ranks learn the outlines of all rows, make the same plan from them, and then send the rows on.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from rollmill.tasks.errors import BatchRefusedError, RollmillError, ShardError, describe_error
from rollmill.tasks.store.segments import Segments
from rollmill.tasks.train.collectives import times
from rollmill.tasks.train.policy_logprobs import MissingLogprobs, OtherPolicy, StoredLogprobs
from rollmill.tasks.train.rank_messages import all_gather_messages, swap_messages
from rollmill.tasks.train.samples import RowOutline, Samples, check_found, no_tokens

T = TypeVar("T")


def read_on_all_ranks(read: Callable[[], T]) -> T:
    """Call `read` on every rank, and return what it returns on this one; a collective, also if it fails on a rank.

    Raises:
        RollmillError: `read` raised it on this rank.
        BatchRefusedError: `read` raised it on another rank.
        ShardError: `read` raised another RollmillError on another rank.
    """
    own, found = None, list[T]()
    try:
        found.append(read())
    except RollmillError as error:
        own = error
    # All ranks must agree before any of them computes: a rank that refused alone would leave the others in a collective.
    refusals = all_gather_messages([] if own is None else [*describe_error(own)], list[str])
    if own is not None:
        raise own
    for rank, refusal in enumerate(refusals):
        if refusal:
            kind, text = refusal
            error_type = BatchRefusedError if kind == BatchRefusedError.__name__ else ShardError
            raise error_type(f"rank {rank} refuses the batch: {text}")
    (result,) = found
    return result


class _SentRow(NamedTuple):
    """What a rank sends of a row: its number, token columns and stored log-probabilities, each as in Samples.

    Routed experts, whose integer type is the store's, travel as their type, shape and bytes; None without them.
    """

    row: int
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    segments: Segments
    routing: tuple[str, tuple[int, ...], bytes] | None
    stored: dict[OtherPolicy, npt.NDArray[np.float32]]


def exchange_outlines(
    samples: Samples, held: set[int], stored: StoredLogprobs
) -> tuple[Samples, MissingLogprobs]:
    """Give every rank the outlines and temperatures of all rows; a collective.

    Args:
        samples: the batch, with the tokens of the rows that this rank has read.
        held: numbers of those rows; each row was read by one rank.
        stored: stored log-probabilities of those rows.

    Returns:
        The batch with outlines and temperatures, and which log-probabilities are not stored; equal on every rank.

    Raises:
        ShardError: a row was read by no rank or by two; on every rank.
    """
    n_fields = len(RowOutline._fields)
    table = np.zeros((len(samples.trajectory_ids), 2 + n_fields + len(stored)), np.int64)
    for row in held:
        is_stored = [samples.trajectory_ids[row] in by_id for by_id in stored.values()]
        table[row] = [1, samples.temperatures[row].view(np.int32), *samples.outline(row), *is_stored]
    # Other ranks have zeros where one has a row, so that the sum is what that one has.
    if table.size and dist.get_world_size() > 1:
        with times.collective():
            dist.all_reduce(torch.from_numpy(table))
    check_found(samples, table[:, 0].tolist())
    outlines = [RowOutline(*each) for each in table[:, 2 : 2 + n_fields].tolist()]
    missing = {
        policy: [row for row, each in enumerate(outlines) if each.n_trained and not table[row, column]]
        for column, policy in enumerate(stored, 2 + n_fields)
    }
    temperatures = table[:, 1].astype(np.int32).view(np.float32)
    return replace(samples, outlines=outlines, temperatures=temperatures), missing


def send_rows(
    samples: Samples, held: set[int], stored: StoredLogprobs, needed: Sequence[set[int]]
) -> tuple[Samples, StoredLogprobs]:
    """Send rows from the ranks that have read them to the ranks that compute them; a collective.

    Args:
        samples: the batch, with the tokens of the rows that this rank has read.
        held: numbers of those rows.
        stored: stored log-probabilities of those rows.
        needed: [W] numbers of the rows that each rank computes; equal on every rank.

    Returns:
        The batch and stored log-probabilities, of the rows that this rank computes.
    """
    if len(needed) == 1:
        return samples, stored
    names = samples.trajectory_ids

    def pack(row: int) -> _SentRow:
        experts = None if samples.routing is None else samples.routing[row]
        return _SentRow(
            row,
            samples.token_ids[row],
            samples.loss_masks[row],
            samples.logprobs[row],
            samples.row_segments(row),
            None if experts is None else (experts.dtype.str, experts.shape, experts.tobytes()),
            {policy: by_id[names[row]] for policy, by_id in stored.items() if names[row] in by_id},
        )

    shares = swap_messages([[pack(row) for row in sorted(held & rows)] for rows in needed], list[_SentRow])
    own, own_logprobs = no_tokens(samples), {policy: dict[str, np.ndarray]() for policy in stored}
    for sent in (each for share in shares for each in share):
        own.token_ids[sent.row], own.loss_masks[sent.row] = sent.token_ids, sent.loss_mask
        own.logprobs[sent.row] = sent.logprobs
        if own.segments is not None:
            own.segments[sent.row] = sent.segments
        if own.routing is not None and sent.routing is not None:
            dtype, shape, content = sent.routing
            own.routing[sent.row] = np.frombuffer(content, dtype).reshape(shape)
        for policy, values in sent.stored.items():
            own_logprobs[policy][names[sent.row]] = values
    return own, own_logprobs
