import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmill.tasks.errors import BatchRefusedError, ShardError
from rollmill.tasks.store.segments import LINEAR, Segment
from rollmill.tasks.train.packing.micro_batch import build_micro_batch
from rollmill.tasks.train.samples import Samples, check_lengths, check_samples, read_samples


@pytest.fixture
def samples(batches: Any, tmp_path: Path) -> Samples:
    batches.write_step(tmp_path, 0, batches.uneven_rows(9))
    return read_samples(str(tmp_path), 0)[1]


def test_rows_have_the_order_of_the_batch(batches: Any, tmp_path: Path) -> None:
    rows = batches.uneven_rows(9)
    written = batches.write_step(tmp_path, 0, rows)
    digest, samples = read_samples(str(tmp_path), 0)

    assert digest == written
    assert samples.trajectory_ids == [f"r-0-{i}" for i in range(9)]
    assert samples.advantages.tolist() == [np.float32(row.advantage) for row in rows]
    assert [len(each) for each in samples.token_ids] == [row.n_prompt + row.n_completion for row in rows]
    assert [int(each.sum()) for each in samples.loss_masks] == [row.n_completion for row in rows]


def test_a_step_without_rows_is_an_empty_batch(batches: Any, tmp_path: Path) -> None:
    batches.write_step(tmp_path, 0, [])

    assert read_samples(str(tmp_path), 0)[1].trajectory_ids == []


def test_a_missing_trajectory_is_named(batches: Any, tmp_path: Path) -> None:
    batches.write_step(tmp_path, 0, batches.uneven_rows(3))
    next((tmp_path / "rollouts").rglob("*.arrow")).unlink()

    with pytest.raises(ShardError, match="r-0-2"):
        read_samples(str(tmp_path), 0)


def test_updates_share_the_rows_that_have_trained_tokens(samples: Samples) -> None:
    assert samples.split(3) == [[0, 1, 2], [3, 4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("logprobs", np.nan, "r-0-1: a sampled token's log-probability is not finite"),
        ("loss_masks", True, "r-0-1: its first token is to be trained"),
    ],
)
def test_a_row_that_would_poison_the_gradient_is_refused(
    samples: Samples, field: str, value: object, message: str
) -> None:
    check_samples(samples)
    column = [each.copy() for each in getattr(samples, field)]
    column[1][:] = value

    with pytest.raises(BatchRefusedError, match=message):
        check_samples(dataclasses.replace(samples, **{field: column}))


def test_unknown_log_probabilities_of_the_sampler_are_refused_only_where_they_are_needed(
    samples: Samples,
) -> None:
    unknown = dataclasses.replace(samples, logprobs=[np.full_like(each, np.nan) for each in samples.logprobs])
    check_samples(unknown, needs_sampler=False)
    with pytest.raises(BatchRefusedError, match=r"r-0-0: .*train\.old_logprobs=trainer"):
        check_samples(unknown)

    infinite = dataclasses.replace(
        samples, logprobs=[np.full_like(each, -np.inf) for each in samples.logprobs]
    )
    with pytest.raises(BatchRefusedError, match="r-0-0: a sampled token's log-probability is not finite"):
        check_samples(infinite, needs_sampler=False)


def test_a_row_longer_than_a_micro_batch_is_refused_by_name(samples: Samples) -> None:
    lengths = [len(each) for each in samples.token_ids]
    longest = int(np.argmax(lengths))
    check_lengths(samples, max(lengths), is_padded=True)
    with pytest.raises(
        BatchRefusedError,
        match=rf"r-0-{longest}: it has {lengths[longest]} tokens, and train\.micro_batch_tokens is {lengths[longest] - 1};",
    ):
        check_lengths(samples, lengths[longest] - 1, is_padded=True)


def test_segments_that_padding_makes_longer_than_a_micro_batch_are_refused_by_name(samples: Samples) -> None:
    n = len(samples.token_ids[0])
    segments = [LINEAR] * len(samples.token_ids)
    # The last token is sampled again: n + 1 tokens, which are 2 n when both segments are written out.
    segments[0] = (LINEAR[0], Segment(n, 0, n - 1, 0))
    ids, masks = [*samples.token_ids], [*samples.loss_masks]
    ids[0], masks[0] = np.append(ids[0], 5), np.append(masks[0], True)
    others = [samples.loss_masks[row][:0] for row in range(1, len(ids))]
    branched = dataclasses.replace(samples, token_ids=ids, loss_masks=[masks[0], *others], segments=segments)
    check_lengths(branched, n + 1, is_padded=False)
    check_lengths(branched, 2 * n, is_padded=True)
    with pytest.raises(
        BatchRefusedError, match=f"r-0-0: its 2 segments, padded to {n} tokens, take {2 * n}, and"
    ):
        check_lengths(branched, 2 * n - 1, is_padded=True)


def test_positions_point_at_the_token_before_each_trained_one(samples: Samples) -> None:
    rows = [4, 8, 0]
    batch = build_micro_batch(samples, rows, sorted(set(samples.envs)), torch.device("cpu"), "padded")
    flat = batch.token_ids.flatten()
    expected = np.concatenate([samples.token_ids[row][samples.loss_masks[row]] for row in rows])

    assert batch.targets.tolist() == flat[batch.positions + 1].tolist() == expected.tolist()
    assert torch.isfinite(batch.sampler_logprobs).all()


def test_a_micro_batch_without_rows_trains_nothing(samples: Samples) -> None:
    batch = build_micro_batch(samples, [], ["addition"], torch.device("cpu"), "padded")

    assert batch.token_ids.shape == (1, 2)
    assert batch.positions.numel() == batch.targets.numel() == batch.advantages.numel() == 0
