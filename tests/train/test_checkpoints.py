"""A stored state is the same on any number of ranks and under every ZeRO stage, bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.train.state_files import StateFiles

RunRanks = Callable[[str, int, dict[str, object]], None]
STAGES = [("float32", stage) for stage in range(4)] + [("bfloat16", stage) for stage in (1, 2, 3)]


def name_of(dtype: str, stage: int, ranks: int) -> str:
    return f"{dtype}-{stage}-{ranks}"


class Place:
    """Jobs of one number of ranks, and the digests that they give."""

    def __init__(self, folder: Path, model: Path, run_ranks: RunRanks) -> None:
        self.folder, self._model, self._run_ranks = folder, model, run_ranks

    def run(self, ranks: int, steps: list[dict[str, Any]]) -> list[dict[str, str]]:
        paths = [self.folder / f"digests-{number}.json" for number in range(len(steps))]
        told = [step | {"digests": str(path)} for step, path in zip(steps, paths, strict=True)]
        self._run_ranks("checkpoint_ranks.py", ranks, {"model": str(self._model), "steps": told})
        return [json.loads(path.read_text()) for path in paths]

    def step(
        self,
        dtype: str,
        stage: int,
        ranks: int,
        *,
        load: str = "",
        save: str = "",
        first: int = 0,
        updates: int = 2,
    ) -> dict[str, Any]:
        return {
            "config": {"ranks": ranks, "zero_stage": stage, "dtype": dtype, "max_grad_norm": 1.0},
            "load": str(self.folder / load) if load else "",
            "save": str(self.folder / save) if save else "",
            "first": first,
            "updates": updates,
        }


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path, run_ranks: RunRanks) -> Place:
    return Place(tmp_path, tiny_model, run_ranks)


def of_the_optimizer(digests: dict[str, str]) -> dict[str, str]:
    return {name: each for name, each in digests.items() if not name.startswith("weights/")}


@pytest.mark.service
def test_a_state_goes_on_bit_for_bit_and_is_the_same_on_other_ranks_and_under_other_stages(
    place: Place,
) -> None:
    saves, ons = [], []
    for dtype, stage in STAGES:
        for name, first in (("before", 0), ("after", 2)):
            saves.append(
                place.step(dtype, stage, 2, save=f"{name_of(dtype, stage, 2)}-{name}", updates=first + 2)
            )
        ons.append(place.step(dtype, stage, 2, load=f"{name_of(dtype, stage, 2)}-before", first=2))
    two = place.run(2, saves + ons)
    before, after = two[: len(saves) : 2], two[1 : len(saves) : 2]
    assert two[len(saves) :] == after, (
        "updates after a load are not those that would have been made without it"
    )
    assert all(x != y for x, y in zip(before, after, strict=True))

    loads = [
        place.step(
            dtype,
            other,
            1,
            load=f"{name_of(dtype, stage, 2)}-before",
            save=f"{name_of(dtype, stage, 1)}-{other}",
            updates=0,
        )
        for dtype, stage in STAGES
        for other in ((0, 1, 2, 3) if dtype == "float32" else (1, 2, 3))
    ]
    one = place.run(1, loads)
    kept = dict(zip([name_of(*each, 2) for each in STAGES], before, strict=True))
    for step, found in zip(loads, one, strict=True):
        saved_as = Path(step["load"]).name.removesuffix("-before")
        assert found == kept[saved_as], (step["load"], step["config"])

    backs = [
        place.step(
            dtype,
            (stage + 1) % 4 if dtype == "float32" else 1 + stage % 3,
            2,
            load=f"{name_of(dtype, stage, 1)}-{stage}",
            updates=0,
        )
        for dtype, stage in STAGES
    ]
    assert place.run(2, backs) == before
    some = place.run(2, [backs[0] | {"updates": 1}])[0]
    assert of_the_optimizer(some) != of_the_optimizer(before[0])


def test_files_that_lack_numbers_are_refused(tmp_path: Path) -> None:
    with (
        StateFiles(tmp_path) as files,
        pytest.raises(Exception, match="has 0 of the 3 numbers of weight/a from 1 on"),
    ):
        files.read("weight", "a", 1, 3)
