"""Which steps can be measured again, and what the table of it looks like; nothing is started."""

import io
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.offline.attribution_table import (
    TOGETHER,
    TRAFFIC_ALONE,
    WIDTH,
    Attribution,
    attribution_page,
)
from rollmill.flows.offline.stored_step import SampledStep
from rollmill.tasks.errors import ShardError
from rollmill.tasks.observe.usage import Usage
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.manifest import read_manifest

Command = Callable[..., str]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attribute"], "give --step too"),
        (["--attribute", "--step", "1", "--from", "1"], "--from = 1:"),
        (["--attribute", "--step", "1", "--to", "3"], "--to = 3:"),
        (["--step", "1"], "--step"),
        (["--json"], "--json"),
        (["--synthetic-traffic", "3"], "--synthetic-traffic"),
        (["--attribute", "--step", "1", "--trainer", "mine"], "give launch or none"),
        (["--attribute", "--step", "9"], "has no such step; steps 0 to 2 are done"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(
    rollmill: Command, words: list[str], message: str
) -> None:
    assert message in rollmill("replay", "small", *words)


def test_a_missing_run_is_refused(rollmill: Command) -> None:
    assert "there is no run" in rollmill("replay", "nobody", "--attribute", "--step", "0")


@pytest.fixture
def copied(small_run: RunFolder, tmp_path: Path) -> RunFolder:
    shutil.copytree(small_run.local, tmp_path / "runs" / "small")
    return RunFolder(tmp_path / "runs" / "small")


def sample_step(folder: RunFolder, step: int) -> SampledStep:
    manifest = read_manifest(folder)
    return SampledStep.read(folder, manifest, RunConfig.model_validate(manifest.config), step)


def test_a_step_without_its_batch_is_refused(copied: RunFolder) -> None:
    shutil.rmtree(copied.dataset("batches", step=2))
    with pytest.raises(Exception, match="stored no batch of it yet; steps 0 to 1 are done"):
        sample_step(copied, 2)


def test_rollouts_that_are_gone_are_named(copied: RunFolder) -> None:
    shutil.rmtree(copied.dataset("rollouts", step=1))
    with pytest.raises(ShardError, match="group 4: stored rollouts are missing"):
        sample_step(copied, 1)


def test_a_step_is_read_with_all_its_trajectories_and_no_later_ones(small_run: RunFolder) -> None:
    step = sample_step(small_run, 1)
    assert [group.group for group in step.groups] == [4, 5, 6, 7]
    assert [group.rollouts.num_rows for group in step.groups] == [step.group_size] * 4 == [4] * 4
    assert not any(group.scores.num_rows or group.has_outcome for group in step.groups)


def test_the_table_has_80_columns_and_names_what_held_the_loop() -> None:
    usage = Usage(12.345, 3.2, 100.4, 0.1, 2.5, 123.4, 12_345_678_901, -(2**20), "task a in b.py:1 c")
    none = Usage(0.0, 0.0, 0.0, math.nan, math.nan, 0.0, 2**20, 0, "")
    unseen = replace(usage, lag_max_ms=7.2, longest="")
    phases = {TRAFFIC_ALONE: usage, "ingesting": none, "scoring": unseen, TOGETHER: usage}
    attribution = Attribution("runs/small", 12, 512, 200, phases, 0.5, same_batch=False)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(attribution_page(attribution))
    lines = console.export_text().splitlines()
    assert max(map(len, lines[:6])) <= WIDTH
    assert "nan" not in "".join(lines)
    assert any("123.4 ms: task a in b.py:1 c" in line for line in lines)
    assert any("ingesting" in line and "never late by 3 ms" in line for line in lines)
    assert any("scoring" in line and "7.2 ms: cause not sampled" in line for line in lines)
    assert any("NOT the stored one" in line for line in lines)
