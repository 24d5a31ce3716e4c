"""docs/reference.md says what settings and commands say of themselves."""

from pathlib import Path

from flows.reference import deployed_flows, page
from flows.settings import settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference.md").read_text()


def test_the_reference_is_what_settings_and_commands_say() -> None:
    assert page(ROOT / "prefect.yaml") == PAGE, "run `python -m flows.reference`"


def test_every_setting_of_a_run_is_a_line_with_its_meaning() -> None:
    lines = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    meanings = {cells[0].strip("| `"): cells[-1].strip("| ") for cells in lines}
    assert [name for name in settings() if len(meanings.get(name, "")) < 10] == []


def test_every_flow_of_prefect_yaml_is_in_its_table() -> None:
    flows = deployed_flows(ROOT / "prefect.yaml")
    assert flows
    assert [flow.name for flow in flows if f"\n| `{flow.name}` |" not in PAGE] == []
