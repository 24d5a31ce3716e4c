"""Where a server keeps the start model's weights, and that adapters are added to the same bytes everywhere."""

import shutil
from pathlib import Path

import pytest
import torch

from rollmill.tasks.sync.adapters import A, B, add_adapters_to, read_weights
from rollmill.tasks.sync.base_weights import SPARE_BYTES, BaseWeights, choose_base_place, measure_place
from rollmill.tasks.sync.links.link import CPU
from rollmill.tasks.sync.weight_messages import AdapterBase

GIB = 1 << 30


@pytest.mark.parametrize(
    ("size_gib", "gpu_gib", "host_gib", "place"),
    [
        (14, 20, 0, "device"),
        (14, 14 + (SPARE_BYTES >> 30), 64, "device"),
        (14, 17, 64, "host"),
        (14, 0, 28, "host"),
        (14, 0, 27, "files"),
    ],
)
def test_the_start_model_is_kept_where_there_is_room(size_gib, gpu_gib, host_gib, place) -> None:
    chosen = choose_base_place(size_gib * GIB, gpu_bytes=gpu_gib * GIB, host_bytes=host_gib * GIB)
    assert chosen == place


def test_a_server_on_a_cpu_maps_the_files(tied_model: Path) -> None:
    assert measure_place(str(tied_model), CPU, 1, is_alone=True) == "files"


@pytest.mark.parametrize("place", ["device", "host"])
def test_kept_weights_are_read_once_and_merge_to_the_same_bytes(tied_model: Path, tmp_path, place) -> None:
    folder = shutil.copytree(tied_model, tmp_path / "model")
    name, weight = next((name, each) for name, each in read_weights(str(folder)) if each.dim() == 2)
    random = torch.Generator().manual_seed(0)
    adapters = {
        name + A: torch.randn(4, weight.shape[1], generator=random),
        name + B: torch.randn(weight.shape[0], 4, generator=random),
    }
    base = AdapterBase(str(folder), "bfloat16", 2.0)
    expected = {key: each.clone() for key, each in add_adapters_to(read_weights(str(folder)), adapters, base)}
    kept = BaseWeights(str(folder), CPU, place)
    for _ in range(2):
        merged = dict(add_adapters_to(kept.read(), adapters, base))
        assert merged.keys() == expected.keys()
        assert all(torch.equal(merged[key], each) for key, each in expected.items())
        shutil.rmtree(folder, ignore_errors=True)
