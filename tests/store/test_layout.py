"""The layout of a run's folder."""

from pathlib import Path

import pytest

from rollmill.tasks.errors import SchemaError
from rollmill.tasks.store.folders import RunFolder, partition_folder, partition_pattern

RUN = RunFolder(Path("runs/a"))


def test_every_part_of_a_run_has_its_folder() -> None:
    assert RUN.dataset("rollouts", step=12) == "runs/a/rollouts/step=000012"
    assert RUN.dataset("scores", scorer="addition@1", step=3) == (
        "runs/a/scores/scorer=addition@1/step=000003"
    )
    assert RUN.dataset("evaluations", version=0) == "runs/a/evaluations/version=000000"
    assert RUN.checkpoint(12) == Path("runs/a/checkpoints/version=000012")
    assert RUN.policy(12) == Path("runs/a/policies/version=000012")
    assert RUN.logs == Path("runs/a/logs")


def test_outer_partitions_may_be_given_alone_and_inner_ones_not() -> None:
    assert RUN.dataset("scores") == "runs/a/scores"
    assert RUN.dataset("scores", scorer="addition@1") == "runs/a/scores/scorer=addition@1"
    with pytest.raises(SchemaError, match="outermost"):
        RUN.dataset("scores", step=1)


def test_an_omitted_partition_means_all_when_reading_and_is_an_error_when_writing() -> None:
    assert partition_pattern("scores", {"step": 1}) == "scores/scorer=*/step=000001"
    with pytest.raises(SchemaError, match="give scorer"):
        partition_folder("scores", {"step": 1})


@pytest.mark.parametrize("scorer", ["addition", "a/b@1", "*@1", "../x@1", "@1", 3])
def test_a_scorer_that_could_not_name_a_folder_is_refused(scorer: str | int) -> None:
    with pytest.raises(SchemaError, match="NAME@VERSION"):
        partition_folder("scores", {"scorer": scorer, "step": 1})


def test_unknown_data_sets_partitions_and_negative_steps_are_refused() -> None:
    with pytest.raises(SchemaError, match="no data set is called 'rewards'"):
        RUN.dataset("rewards")
    with pytest.raises(SchemaError, match="rollouts is partitioned by step, not by version"):
        RUN.dataset("rollouts", version=1)
    with pytest.raises(SchemaError, match="expected an integer >= 0, got -1"):
        RUN.dataset("rollouts", step=-1)


def test_a_run_on_s3_has_a_local_folder_for_files_that_s3_cannot_hold() -> None:
    run = RunFolder("s3://bucket/team/a/")
    assert (run.name, run.is_local) == ("a", False)
    assert run.path("run.json") == "s3://bucket/team/a/run.json"
    assert run.logs == Path(".rollmill/scratch/bucket/team/a/logs")
