"""The endurance benchmark has figures of each step, or says that it has not."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.endurance import LAGS, MEMORY, around, draw, series_of
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.schemas import make_batch
from rollmill.tasks.store.shards.writer import RunWriter

STEPS = 3


async def store_metrics(folder: RunFolder, names: list[str]) -> None:
    """Metrics of STEPS steps, each its step's number, by a run's writer."""
    folder.tmp.mkdir(parents=True)
    async with RunWriter(open_files(folder), 1, 0.0) as writer:
        for step in range(STEPS):
            n = len(names)
            columns = {"run": ["a"] * n, "step": [step] * n, "name": names, "env": ["all"] * n}
            rows = make_batch("metrics", columns | {"stat": ["value"] * n, "value": [float(step)] * n})
            await writer.append("metrics", rows, step=step)


@pytest.mark.slow
async def test_the_series_are_those_of_the_runs_metrics(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    await store_metrics(folder, [*MEMORY, *LAGS, "rollout/reward"])
    series = series_of(folder, STEPS)
    assert series.keys() == {*MEMORY, *LAGS}
    assert all(list(values) == [0.0, 1.0, 2.0] for values in series.values())
    draw(series, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


async def test_a_step_without_figures_is_an_error(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    await store_metrics(folder, [*MEMORY, *LAGS])
    with pytest.raises(RuntimeError, match="of 3 steps, and the run had 4"):
        series_of(folder, STEPS + 1)


def test_a_figure_is_the_median_of_the_steps_up_to_it() -> None:
    values = np.asarray([9.0, 1.0, 2.0, 3.0, 4.0, 50.0, 0.0])
    assert around(values, 6) == 3.0
    assert around(values, 1) == 9.0
