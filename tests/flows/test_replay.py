"""A replay concurrent with the trainer of its run."""

from pathlib import Path

import pytest

from rollmill.flows.offline.replay_trainer import make_scratch
from rollmill.tasks.store.folders import SCRATCH_ENV, RunFolder


def test_copies_of_checkpoints_are_on_the_scratch_disk_and_apart_from_those_of_the_runs_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SCRATCH_ENV, str(tmp_path))
    run = RunFolder("s3://bucket/runs/small")
    with make_scratch(run) as scratch:
        assert scratch.is_relative_to(tmp_path)
        assert not scratch.is_relative_to(run.local)
        monkeypatch.setenv(SCRATCH_ENV, str(scratch))
        assert run.local.is_relative_to(scratch)
    assert not scratch.exists()
