"""A remote file that is read in ranges: the same bytes as the file's, in few requests, and the error of a failed one."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.tasks.errors import ShardError
from rollmill.tasks.store.filesystem import RangeFile

CONTENT = bytes(range(200))


@given(
    st.integers(0, 200),
    st.integers(0, 50),
    st.lists(st.tuples(st.integers(0, 220), st.none() | st.integers(-1, 220)), max_size=8),
)
def test_every_read_gives_the_bytes_of_the_file(
    tail_at: int, least: int, reads: list[tuple[int, int | None]]
) -> None:
    asked: list[tuple[int, int]] = []

    def fetch(start: int, end: int) -> tuple[int, bytes]:
        asked.append((start, end))
        begin = start - start % 7  # whole blocks, as of a checked shard
        return begin, CONTENT[begin:end]

    file, plain = RangeFile(fetch, tail_at, CONTENT[tail_at:], least), io.BytesIO(CONTENT)
    for at, size in reads:
        assert file.seek(at) == plain.seek(at)
        assert file.read(size) == plain.read(size)
        assert file.tell() == plain.tell()
    assert all(0 <= start < end <= tail_at for start, end in asked)
    assert all(end - start >= min(least, tail_at - start) for start, end in asked)


def test_the_error_of_a_request_is_kept() -> None:
    def fetch(start: int, end: int) -> tuple[int, bytes]:
        raise ShardError("s3://bucket/a was replaced while it was read")

    file = RangeFile(fetch, 100, CONTENT[100:], 1)
    with pytest.raises(ShardError, match="was replaced"):
        file.read(1)
    assert "was replaced" in str(file.error)
