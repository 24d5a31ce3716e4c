"""Weights in files: whole or not there, on a disk and on S3, where whoever has an address can read them."""

from pathlib import Path
from urllib.request import urlopen

import pytest

from rollmill.tasks.store.checkpoints.weight_snapshots import (
    list_complete_weights,
    publish_rank_weights,
    remove_weights,
    weight_urls,
    weights_location,
)
from rollmill.tasks.store.folders import RunFolder


@pytest.fixture(params=["disk", pytest.param("s3", marks=pytest.mark.service)])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "disk":
        return str(tmp_path / "weights")
    monkeypatch.setenv("ROLLMILL_SCRATCH", str(tmp_path / "scratch"))
    return f"{request.getfixturevalue('s3_root')}/weights"


def publish(place: str, name: str, rank: int, content: bytes = b"w") -> str:
    return publish_rank_weights(place, name, rank, 2, lambda path: path.write_bytes(content) and None)


def test_weights_are_there_when_every_rank_s_file_is(place: str) -> None:
    second = publish(place, "1-000003", 1)
    assert list_complete_weights(place, "1-000003") == []
    first = publish(place, "1-000003", 0)
    assert list_complete_weights(place, "1-000003") == [first, second]


def test_other_weights_are_removed(place: str) -> None:
    names = ("1-000003", "1-000004", "2-000004", "1-000003-ab", "1-000004-cd")
    for name in names:
        for rank in range(2):
            publish(place, name, rank)
    staged = RunFolder(place).tmp / "of a killed trainer"
    staged.parent.mkdir(parents=True, exist_ok=True)
    staged.write_bytes(b"part")
    remove_weights(place, but="1-000004")
    assert not staged.exists()
    # Changes of the same version may be read by another server still.
    assert [bool(list_complete_weights(place, name)) for name in names] == [False, True, False, False, True]
    remove_weights(place)
    assert list_complete_weights(place, "1-000004") == []


def test_a_file_is_read_by_its_address_without_credentials(place: str) -> None:
    path = publish(place, "1-000003", 0, b"some weights")
    (address,) = weight_urls([path], lifetime_s=60.0)
    if address.startswith("http"):
        with urlopen(address) as answer:
            assert answer.read() == b"some weights"
    else:
        assert address == path
        assert Path(path).read_bytes() == b"some weights"


def test_weights_are_stored_below_the_run_or_by_its_id_below_the_configured_folder(tmp_path: Path) -> None:
    assert weights_location(RunFolder(tmp_path), "id", "") == f"{tmp_path}/.tmp/weights"
    assert weights_location(RunFolder("s3://bucket/run"), "id", "") == "s3://bucket/run/.tmp/weights"
    assert weights_location(RunFolder(tmp_path / "run"), "id", f"{tmp_path}/") == f"{tmp_path}/id"
