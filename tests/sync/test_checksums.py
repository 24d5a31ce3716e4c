"""Which tensors are compared at which version, and how differences are reported."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.tasks.errors import ChecksumError
from rollmill.tasks.sync.weight_parity import compare_checksums, select_names


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 1000))
def test_every_tensor_is_compared_within_one_cycle_of_versions(n_tensors, n, first) -> None:
    names = [f"tensor.{i}" for i in range(n_tensors)]
    versions = range(first, first + ceil(n_tensors / n))
    assert {name for version in versions for name in select_names(names, version, n)} == set(names)


@given(st.integers(0, 40), st.integers(0, 50), st.integers(0, 1000))
def test_a_version_compares_the_requested_number_of_tensors_and_none_twice(n_tensors, n, version) -> None:
    found = select_names([f"tensor.{i}" for i in range(n_tensors)], version, n)
    assert len(found) == len(set(found)) == min(n, n_tensors)


def test_tensors_that_arrived_as_they_were_sent_pass() -> None:
    compare_checksums("http://a", "run:1:2", {"norm": "ab"}, {"norm": "ab", "head": "cd"})


def test_tensors_that_differ_or_have_no_checksum_are_named_with_server_and_version() -> None:
    with pytest.raises(ChecksumError, match=r"http://a at version run:1:2: 2 tensors .*: norm, head$"):
        compare_checksums(
            "http://a",
            "run:1:2",
            {"norm": "ab", "head": "cd", "embedding": "ef"},
            {"norm": "00", "embedding": "ef"},
        )


def test_of_many_tensors_that_differ_a_few_are_named_and_the_others_counted() -> None:
    with pytest.raises(ChecksumError, match=r"290 tensors differ .*: 0, 1, 2, 3, 4, 5, 6, 7, and 282 more$"):
        compare_checksums("http://a", "run:1:2", {str(i): "ab" for i in range(290)}, {})
