"""A stored step's phases measured again: Prefect, the store, the scorer's worker and the trainer are real, the server is a stub."""

import asyncio
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollmill.flows.configuration.config import RunConfig
from rollmill.tasks.score.group_outcomes import batch_rows, compute_batch_advantages
from rollmill.tasks.score.stored_scores import recompute_advantages
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.manifest import read_manifest, write_manifest
from rollmill.tasks.store.run.writable_run import OpenRun

pytestmark = pytest.mark.service

WITHOUT_TRAINER = ["storing", "scoring", "recording", "advantages", "batch", "reporting", "together"]
WITH_TRAINER = [*WITHOUT_TRAINER[:5], "training", "ingesting", "weights", *WITHOUT_TRAINER[5:]]
STEPS, SCORER = 2, "addition@1"


def contents(folder: Path) -> dict[str, str]:
    """A digest of every file, by path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


async def store_batches(folder: RunFolder, steps: int = STEPS) -> None:
    """Give a collected run the batches that training would have stored: no server is there that takes its weights."""
    manifest = read_manifest(folder)
    config = RunConfig.model_validate(manifest.config)
    with OpenRun.extend(folder, config_of=config.store) as store:
        async with store.writer as writer:
            for step in range(steps):
                groups = recompute_advantages(folder, step, SCORER, config.score).values()
                outcomes = [outcome for each in groups for outcome in each]
                rows = batch_rows(
                    manifest.run, step, compute_batch_advantages(config.score, outcomes), SCORER
                )
                await writer.append("batches", rows, step=step)
        write_manifest(store.files, replace(store.manifest, trains=True), store.manifest)


@pytest.mark.long
def test_a_steps_phases_are_measured_and_nothing_is_written_into_the_run(
    workplace: Any, stub_python: str
) -> None:
    settings = [f"serve.python={stub_python}", f"steps={STEPS}", "train.annotate_every=1"]
    words = [word for setting in settings for word in ("--set", setting)]
    collected = workplace.run("collect", "small", *words)
    assert collected.returncode == 0, collected.stdout
    run = RunFolder(workplace.folder / "runs" / "small-collected")
    asyncio.run(store_batches(run))
    before = contents(run.local)

    traffic = ["--synthetic-traffic", "5", "--json"]
    measured = workplace.run("replay", "small-collected", "--attribute", "--step", "1", *traffic)
    assert measured.returncode == 0, measured.stdout
    found = json.loads(measured.stdout[measured.stdout.index("\n{\n") :])
    assert list(found["phases"]) == ["traffic alone", *WITH_TRAINER]
    assert (found["n_trajectories"], found["synthetic_traffic"], found["same_batch"]) == (24, 5, True)
    assert found["read_s"] > 0.0
    assert all(usage["rss_peak_bytes"] > 0 for usage in found["phases"].values())
    assert found["phases"]["training"]["below_cpu_s"] > 0.0

    table = workplace.run("replay", "small-collected", "--attribute", "--step", "0", "--trainer", "none")
    assert table.returncode == 0, table.stdout
    assert "The batch is the stored one." in table.stdout
    assert "tok/s" not in table.stdout
    assert "\n\n\n" not in table.stdout
    assert all(f"\n{name} " in table.stdout for name in WITHOUT_TRAINER)
    assert not any(f"\n{name} " in table.stdout for name in set(WITH_TRAINER) - set(WITHOUT_TRAINER))
    assert contents(run.local) == before


@pytest.mark.long
def test_a_step_stored_on_s3_is_measured_locally_and_nothing_is_written_to_s3(
    workplace: Any, stub_python: str, s3_root: str
) -> None:
    settings = [f"serve.python={stub_python}", f"store.root={s3_root}", "steps=1"]
    words = [word for setting in settings for word in ("--set", setting)]
    collected = workplace.run("collect", "small", *words)
    assert collected.returncode == 0, collected.stdout
    run = RunFolder(f"{s3_root}/small-collected")
    asyncio.run(store_batches(run, steps=1))
    before = open_files(run).keys("**/*")
    measured = workplace.run("replay", run.location, "--attribute", "--step", "0", "--json")
    assert measured.returncode == 0, measured.stdout
    found = json.loads(measured.stdout[measured.stdout.index("\n{\n") :])
    assert list(found["phases"]) == WITH_TRAINER
    assert found["same_batch"]
    assert open_files(run).keys("**/*") == before
