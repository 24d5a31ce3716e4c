"""docs/reference/settings.md, made from the descriptions of settings and commands: `python -m rollmill.flows.reference` writes it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import typer
import yaml
from prefect.flows import Flow
from pydantic.fields import FieldInfo
from typer.core import TyperGroup
from typing_extensions import TypeIs

from rollmill.flows.cli import app
from rollmill.flows.configuration.forms import FORMS, inline_definitions
from rollmill.tasks.config import StageConfig, import_named

PAGE = Path("docs") / "reference" / "settings.md"
DEPLOYMENTS = Path("prefect.yaml")
TITLE = """\
# Reference

Every flow's settings and every command, as they describe themselves. `python -m rollmill.flows.reference` writes this page.

A setting is named as `--set` takes it: `--set train.lr=1e-6`. **Fixed** settings cannot change when a run is resumed
([operations](../how-to/operations.md#resuming-a-run)). No number may be infinite or NaN. A list is written `[one,two]`.
A setting of the type *text or mapping* takes the name of a [plug-in](glossary.md#words), or `{name: NAME, args: {ARGUMENT: VALUE}}` ([arguments](../how-to/scorers.md#arguments)).
"""
_SETTINGS_HEAD = "| setting | type | default | allowed | fixed | meaning |\n|---|---|---|---|---|---|"
_COMMANDS_HEAD = "| argument or option | meaning |\n|---|---|"
_LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def page(deployments: Path = DEPLOYMENTS) -> str:
    """Return the text of docs/reference/settings.md: every flow that prefect.yaml deploys, every setting and every command."""
    flows = list_deployed_flows(deployments)
    parts = [TITLE, "## Flows\n", "\n".join(_flows(flows)), "\n".join(_sections(flows)), "## Commands\n"]
    return "\n".join([*parts, "\n".join(_commands())]).rstrip() + "\n"


def list_deployed_flows(deployments: Path = DEPLOYMENTS) -> list[Flow[..., Any]]:
    """Import the flows that the deployments of prefect.yaml name, each once, in the order in which they are named."""
    listed = yaml.safe_load(deployments.read_text())["deployments"]
    names = dict.fromkeys(str(each["entrypoint"]) for each in listed)
    return [import_named("entrypoint", ":".join(name.rsplit(".", 1)), {}) for name in names]


def _parameters(flow: Flow[..., Any]) -> dict[str, Any]:
    hints = get_type_hints(flow.fn)
    return {name: kind for name, kind in hints.items() if name != "return"}


def _config(flow: Flow[..., Any]) -> type[StageConfig] | None:
    """Return the settings that a flow takes; None for one that has only a few parameters."""
    return next((kind for kind in _parameters(flow).values() if _is_section(kind)), None)


def _is_section(kind: Any) -> TypeIs[type[StageConfig]]:
    return isinstance(kind, type) and issubclass(kind, StageConfig)


def _flows(flows: list[Flow[..., Any]]) -> Iterator[str]:
    yield "| flow | what it does | parameters | settings | not read |\n|---|---|---|---|---|"
    for flow in flows:
        config = _config(flow)
        summary = (flow.fn.__doc__ or "").strip().partition("\n")[0]
        parameters = ", ".join(f"`{name}`" for name in _parameters(flow))
        if config is None:
            yield _line(f"`{flow.name}`", summary, parameters, "", "")
            continue
        hidden = FORMS[flow.name].hidden
        not_read = sorted(
            name for name in hidden if name in config.model_fields or not name.startswith("train.")
        )
        unread = ", ".join(f"`{name}`" for name in not_read)
        if len(not_read) < len(hidden):
            unread += ", most of `train`"
        link = f"[{config.__name__}](#{config.__name__.lower()})"
        yield _line(f"`{flow.name}`", summary, parameters, link, unread)
    yield "\nA section that several flows have is described once. A flow's form in Prefect leaves out what the flow does not read.\n"


def _sections(flows: list[Flow[..., Any]]) -> Iterator[str]:
    """Yield headings and tables of all flows' settings: top-level ones, then each section once, before those inside it."""
    described: set[tuple[str, type[StageConfig]]] = set()
    for config in dict.fromkeys(filter(None, map(_config, flows))):
        names = ", ".join(f"`{flow.name}`" for flow in flows if _config(flow) is config)
        yield f"### {config.__name__}\n\nOf {names}.\n"
        yield from _table(config, "")
        yield from _below(config, "", described)


def _below(
    model: type[StageConfig], prefix: str, described: set[tuple[str, type[StageConfig]]]
) -> Iterator[str]:
    for name, field in model.model_fields.items():
        section, path = field.annotation, f"{prefix}{name}"
        if not _is_section(section) or (path, section) in described:
            continue
        described.add((path, section))
        yield f"### {path}\n\n{field.description}\n"
        yield from _table(section, f"{path}.")
        yield from _below(section, f"{path}.", described)


def _table(model: type[StageConfig], prefix: str) -> Iterator[str]:
    """Yield the markdown table of one section's settings; a subsection is one line with a link to its own table."""
    whole = model.model_json_schema()
    properties = inline_definitions(whole["properties"], whole.get("$defs", {}))
    yield _SETTINGS_HEAD
    for name, field in model.model_fields.items():
        path, shape = f"{prefix}{name}", properties[name]
        if _is_section(field.annotation):
            yield _line(f"`{path}`", "section", "", "", "", f"[{field.description}](#{_anchor(path)})")
        else:
            mark = "fixed" if shape.get("fixed") else ""
            default = _default(field)
            yield _line(f"`{path}`", _kind(shape), default, _range_text(shape), mark, field.description or "")
    yield ""


def _default(field: FieldInfo) -> str:
    """Return a setting's default as `--set` takes it; "by the machine" if a function computes it, empty if there is none."""
    if field.default_factory:
        return "by the machine"
    return "" if field.is_required() else _code(field.default)


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _kind(shape: dict[str, Any]) -> str:
    """Return a setting's type in words. Example: {"type": "array", "items": {"type": "string"}} gives "list of text"."""
    words = {
        "string": "text",
        "integer": "integer",
        "number": "number",
        "boolean": "yes or no",
        "null": "none",
        "object": "mapping",
    }
    if "anyOf" in shape:
        return " or ".join(_kind(each) for each in shape["anyOf"])
    if shape.get("type") == "array":
        return f"list of {_kind(_items(shape))}"
    return "choice" if "enum" in shape else words.get(shape.get("type", ""), shape.get("type", ""))


def _items(shape: dict[str, Any]) -> dict[str, Any]:
    """Return the shape of a list's values; of a list of fixed length that of its first value."""
    first: dict[str, Any] = shape.get("prefixItems", [shape.get("items", {})])[0]
    return first


def _range_text(shape: dict[str, Any]) -> str:
    """Return a setting's choices, range, pattern, fewest characters or length; empty without any.

    Example: {"minimum": 1, "exclusiveMaximum": 5} gives "≥ 1, < 5".
    """
    shapes = [shape, *shape.get("anyOf", []), _items(shape)]
    for each in shapes:
        if "enum" in each:
            return ", ".join(_code(choice) for choice in each["enum"])
    ranges = [f"{sign} {each[key]:.10g}" for each in shapes for key, sign in _LIMITS.items() if key in each]
    texts = [f"matches `{each['pattern']}`" for each in shapes if "pattern" in each]
    texts += [f"characters ≥ {each['minLength']}" for each in shapes if "minLength" in each]
    # Only lists of fixed length have a least length.
    texts += [f"length {each['minItems']}" for each in shapes if "minItems" in each]
    return ", ".join(ranges + texts)


def _code(value: object) -> str:
    """Format a value as `--set` takes it, in markdown's backquotes; None is "none", an empty text "empty"."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple | list):
        return f"`[{','.join(str(each) for each in value)}]`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`" if str(value) else "empty"


def _commands() -> Iterator[str]:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    whole = typer.Context(group, info_name="rollmill")
    for name in group.list_commands(whole):
        command = group.commands[name]
        context = typer.Context(command, whole, name)
        usage = " ".join([name, *command.collect_usage_pieces(context)])
        yield f"### rollmill {name}\n\n`rollmill {usage}`\n\n{_paragraph(command.help or '')}\n"
        if command.params:
            yield _COMMANDS_HEAD
            records = (each.get_help_record(context) for each in command.params)
            yield from (_line(f"`{name}`", meaning) for name, meaning in filter(None, records))
            yield ""


def _paragraph(text: str) -> str:
    return "\n\n".join(" ".join(each.split()) for each in re.split(r"\n\s*\n", text))


def _line(*cells: str) -> str:
    return f"| {' | '.join(' '.join(cell.replace('|', chr(92) + '|').split()) for cell in cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page())
