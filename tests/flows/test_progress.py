"""The progress of steps without a terminal."""

import pytest
from prefect.logging import disable_run_logger

from rollmill.flows.prefect_integration.progress import RunProgress


def read_lines(capsys: pytest.CaptureFixture[str], *, is_shown: bool) -> str:
    with disable_run_logger(), RunProgress("run", 2, is_shown=is_shown) as progress:
        progress.begin(0)
        for step in range(2):
            progress.step_done(step, reward=0.5, tokens_per_s=1000.0, seconds=2.0, dropped="")
    return capsys.readouterr().err


def test_a_step_is_a_line_and_nothing_else_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_lines(capsys, is_shown=True).splitlines() == [
        "step 0 (1 of 2): reward 0.50, 1,000 tok/s, 2.0 s",
        "step 1 (2 of 2): reward 0.50, 1,000 tok/s, 2.0 s",
    ]


def test_of_steps_that_are_measured_again_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert not read_lines(capsys, is_shown=False)
