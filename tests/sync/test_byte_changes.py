"""Changes of bytes: what is applied equals what was encoded, bit by bit; what is damaged or of another state is an error."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync import byte_changes
from rollmill.tasks.sync.byte_changes import ByteRun, apply_changes, encode_changes
from rollmill.tasks.sync.links.link import as_bytes

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8)


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bytes, copied."""
    return as_bytes(tensor).numpy().copy()


def cut(data: np.ndarray, ends: list[int]) -> ByteRun:
    """The same bytes in separate buffers."""
    return ByteRun([each.copy() for each in np.split(data, sorted(ends))])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks in a kilobyte."""
    monkeypatch.setattr(byte_changes, "CHUNK_BYTES", 512)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 999),
    dtype=st.sampled_from(DTYPES),
    n=st.integers(1, 1500),
    share=st.sampled_from([0.0, 0.001, 0.02, 0.5, 0.9, 1.0]),
    is_random=st.booleans(),
    ends=st.lists(st.integers(0, 3000), max_size=4),
)
def test_applied_changes_give_the_new_bytes(seed, dtype, n, share, is_random, ends) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = (torch.randn(n, generator=generator) * 20).to(dtype)
    size = old.element_size()
    # Any bit pattern, NaN with payloads and infinities too, or a neighbour.
    random = torch.randint(-128, 128, (n * size,), dtype=torch.int8, generator=generator).view(dtype)
    near = (old.to(torch.float64) * 1.01 + 1e-4).to(dtype)
    is_changed = torch.rand(n, generator=generator) < share
    new = torch.where(is_changed, random if is_random else near, old)
    before, after = bytes_of(old), bytes_of(new)
    sent, held = before.copy(), cut(before, [end % (n * size) for end in ends])
    changes, differs = encode_changes(sent, cut(after, [end // 3 % (n * size) for end in ends]), size)
    apply_changes(held, memoryview(changes))
    assert np.array_equal(held.read(0, held.size_bytes), after)
    assert np.array_equal(sent, after), "the sender's copy is the new state"
    assert differs == (not np.array_equal(before, after))


def test_zeros_of_both_signs_and_values_that_are_no_numbers_are_different_values() -> None:
    patterns = np.array([0x0000, 0x8000, 0x7FC0, 0x7FC1, 0xFFC0, 0x7F80, 0xFF80], np.uint16)
    old, new = np.repeat(patterns, 7).view(np.uint8), np.tile(patterns, 7).view(np.uint8)
    held = ByteRun([old.copy()])
    changes, _ = encode_changes(old.copy(), ByteRun([new]), 2)
    apply_changes(held, memoryview(changes))
    assert np.array_equal(held.read(0, len(new)), new)


@pytest.mark.parametrize(("share", "most"), [(0.0, 0.03), (0.02, 0.05), (0.2, 0.2), (1.0, 0.5)])
def test_small_steps_take_a_small_share_of_the_bytes(monkeypatch, share: float, most: float) -> None:
    monkeypatch.undo()
    generator = np.random.default_rng(0)
    old = generator.integers(0, 1 << 15, 1 << 17).astype(np.uint16)
    steps = generator.choice([1, -1], len(old)) * (generator.random(len(old)) < share)
    new = old + steps.astype(np.uint16)
    changes, _ = encode_changes(old.copy().view(np.uint8), ByteRun([new.view(np.uint8)]), 2)
    assert len(changes) <= most * new.nbytes


def test_bytes_that_have_nothing_in_common_take_hardly_more_than_themselves() -> None:
    random = np.random.default_rng(0)
    old, new = (random.integers(0, 256, 4096).astype(np.uint8) for _ in range(2))
    changes, _ = encode_changes(old, ByteRun([new]), 2)
    assert len(changes) <= 1.05 * len(new)


def test_threads_give_the_same_changes() -> None:
    random = np.random.default_rng(0)
    old, new = (random.integers(0, 3, 1 << 14).astype(np.uint8) for _ in range(2))
    with ThreadPoolExecutor(4) as threads:
        several, _ = encode_changes(old.copy(), ByteRun([new]), 2, threads.map)
    assert several == encode_changes(old.copy(), ByteRun([new]), 2)[0]


def test_changes_of_another_state_are_an_error() -> None:
    old = np.arange(2048, dtype=np.uint16)
    new = old.copy()
    new[::50] += 1
    changes, _ = encode_changes(old.copy().view(np.uint8), ByteRun([new.view(np.uint8)]), 2)
    other = old.copy()
    other[7] += 1
    with pytest.raises(SyncError, match=r"bytes 0 to 512 have the checksum .* they were other bytes before"):
        apply_changes(ByteRun([other.view(np.uint8)]), memoryview(changes))


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 10**6), byte=st.integers(1, 255), share=st.sampled_from([0.02, 0.3, 1.0]))
def test_damaged_changes_are_an_error_or_give_the_new_bytes(at: int, byte: int, share: float) -> None:
    random = np.random.default_rng(0)
    old = random.integers(0, 1 << 16, 1000).astype(np.uint16)
    new = old + (random.random(1000) < share).astype(np.uint16)
    changes = bytearray(encode_changes(old.copy().view(np.uint8), ByteRun([new.view(np.uint8)]), 2)[0])
    changes[at % len(changes)] ^= byte
    held = ByteRun([old.view(np.uint8)])
    try:
        apply_changes(held, memoryview(changes))
    except SyncError:
        return
    # Not each bit of a compressed stream matters.
    assert np.array_equal(held.read(0, new.nbytes), new.view(np.uint8))


@pytest.mark.parametrize("n_bytes", [0, 3, 20, -1])
def test_changes_that_end_too_early_or_too_late_are_an_error(n_bytes: int) -> None:
    old = np.zeros(2048, np.uint8)
    changes, _ = encode_changes(old.copy(), ByteRun([np.ones(2048, np.uint8)]), 2)
    given = changes[:n_bytes] if n_bytes >= 0 else changes + b"x"
    with pytest.raises(SyncError, match="changes"):
        apply_changes(ByteRun([old]), memoryview(given))
