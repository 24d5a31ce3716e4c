"""A run that is resumed says so, with the settings that changed."""

from rollmill.flows.run.live_run import SHOWN_CHANGES, describe_resumption


def test_the_line_names_the_run_and_its_changed_settings() -> None:
    line = describe_resumption("runs/quickstart", ["steps: 2 -> 40", "train.lr: 1e-06 -> 1e-05"])
    assert line == "resuming runs/quickstart with steps: 2 -> 40, train.lr: 1e-06 -> 1e-05"
    assert describe_resumption("runs/quickstart", []) == "resuming runs/quickstart"


def test_many_and_long_changes_are_cut() -> None:
    changes = [f"setting.{number}: {'word ' * 100}-> b" for number in range(SHOWN_CHANGES + 3)]
    line = describe_resumption("runs/a", changes)
    assert len(line) < 1000
    assert line.endswith("and 3 more")
