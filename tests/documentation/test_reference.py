"""Settings and commands behave as docs/reference/settings.md describes them."""

import re
from pathlib import Path

import pytest
import typer

from rollmill.flows.cli import app
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.settings import apply_overrides, get_setting, parse_settings, settings
from rollmill.flows.reference import list_deployed_flows
from rollmill.tasks.config import StageConfig
from rollmill.tasks.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "settings.md").read_text()
DEFAULTS = RunConfig().model_dump(mode="json")
ROWS = {
    cells[0].strip("| `"): [cell.strip() for cell in cells[1:]]
    for cells in (
        re.split(r" (?<!\\)\| ?", f"{line.removesuffix('|')}| ") for line in reversed(PAGE.splitlines())
    )
    if cells[0].startswith("| `") and len(cells) >= 6
}
"""Type, default, allowed values, mark and meaning of each setting, by its name; of a name that two flows have, the row of runs, the first."""


def describe_settings(model: type[StageConfig], prefix: str = "") -> dict[str, str]:
    """The meaning of every setting of a configuration, by its name."""
    found: dict[str, str] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, StageConfig):
            found |= describe_settings(field.annotation, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = " ".join((field.description or "").split())
    return found


def run_with(name: str, value: str) -> RunConfig:
    return parse_settings(RunConfig, apply_overrides({}, [f"{name}={value}"]))


def test_every_setting_of_a_run_has_a_row_with_its_meaning_and_whether_it_is_fixed() -> None:
    meanings = describe_settings(RunConfig)
    assert len(meanings) > 100
    rows = {name: (ROWS[name][3], ROWS[name][4].replace(r"\|", "|")) for name in meanings if name in ROWS}
    expected = {name: ("fixed" if fixed else "", meanings[name]) for name, fixed in settings().items()}
    assert rows == expected, "run `python -m rollmill.flows.reference`"


def test_a_default_as_the_page_writes_it_is_what_a_run_has_without_it() -> None:
    # Left out: those that are empty, chosen by the machine, or a prompt, which no command line has.
    written = {name: ROWS[name][1] for name in settings() if re.fullmatch(r"`[^`]{1,60}`", ROWS[name][1])}
    assert len(written) > 100
    overrides = [f"{name}={default.strip('`')}" for name, default in written.items()]
    values = parse_settings(RunConfig, apply_overrides({}, overrides)).model_dump(mode="json")
    for name in written:
        assert get_setting(values, name, None) == get_setting(DEFAULTS, name, None), name


@pytest.mark.parametrize(("sign", "outside"), [("≥", -1e-6), ("≤", 1e-6), (">", 0.0), ("<", 0.0)])
def test_a_value_outside_the_allowed_ones_is_refused_under_its_name(sign: str, outside: float) -> None:
    tried = 0
    for name in settings():
        kind, _, allowed, *_ = ROWS[name]
        if kind in ("integer", "number") and (match := re.search(rf"(?:^|, ){sign} ([-\d.e]+)", allowed)):
            edge = float(match[1])
            value = f"{edge + outside:.9f}" if kind == "number" else str(round(edge + 1e6 * outside))
            with pytest.raises(ConfigError) as refused:
                run_with(name, value)
            assert refused.value.field == name
            tried += 1
    assert tried


def test_a_choice_of_the_page_is_accepted_and_another_is_refused() -> None:
    chosen = [name for name in settings() if ROWS[name][0] == "choice"]
    assert chosen
    for name in chosen:
        with pytest.raises(ConfigError) as refused:
            run_with(name, "no-such-choice")
        assert refused.value.field == name


def test_every_command_has_a_section_with_all_its_options() -> None:
    group = typer.main.get_command(app)
    sections = dict(re.findall(r"^### rollmill (\S+)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
    assert set(sections) == set(group.commands)  # type: ignore[attr-defined]
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        options = [option for each in command.params for option in each.opts if option.startswith("--")]
        assert [each for each in options if each not in sections[name]] == [], name


def test_every_flow_of_prefect_yaml_is_in_its_table() -> None:
    flows = list_deployed_flows(ROOT / "prefect.yaml")
    assert flows
    assert [flow.name for flow in flows if f"\n| `{flow.name}` |" not in PAGE] == []
