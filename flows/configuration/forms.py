"""The run form of each flow in Prefect's UI: the settings that it reads, those that people change first.

Prefect sorts a form's fields by `position` within each section, and cannot fold sections. So a form has two levels: the basic
settings in their sections, and below them the section `advanced` with all others, by the same sections. A flow takes values of
this shape and of the plain one, which the command line and run.json have.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from rollmill.flows.configuration.config import AnnotateConfig, RescoreConfig, RunConfig
from rollmill.flows.configuration.environment_config import may_differ
from rollmill.flows.configuration.presets import merge_settings
from rollmill.flows.configuration.settings import UNREAD_BY_COLLECT, settings
from rollmill.tasks.config import StageConfig
from rollmill.tasks.rollout.environment import WITH_ARGUMENTS, describe_environment_arguments

ADVANCED = "advanced"
_ABOUT_ADVANCED = "Settings that rarely need another value than their default."


@dataclass(frozen=True, slots=True)
class RunForm:
    """The form in Prefect's UI for the settings of one flow: basic ones first, all others in a section `advanced`.

    Attributes:
        model: the flow's settings.
        hidden: sections and settings that the flow does not read, by dotted name.
    """

    model: type[StageConfig]
    hidden: frozenset[str] = frozenset()

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of a deployment's parameter `config`, from which Prefect shows the form."""
        whole = self.model.model_json_schema()
        shown = _show_overrides(
            _show_arguments(_drop(inline_definitions(whole, whole["$defs"]), self.hidden))
        )
        basic, advanced = _select(shown, is_basic=True), _select(shown, is_basic=False)
        section = advanced | {"title": "Advanced", "description": _ABOUT_ADVANCED}
        return _number(basic | {"properties": basic["properties"] | {ADVANCED: section}})

    def values(self, config: StageConfig) -> dict[str, Any]:
        """Return settings as JSON values in the shape of the form: basic ones in their sections, all others below `advanced`.

        Settings that the machine decides, such as dtype, are left out unless they were set.
        """
        basic, advanced = self._split(config, config.model_dump(mode="json"), "")
        return basic | ({ADVANCED: advanced} if advanced else {})

    def _split(
        self, config: StageConfig, values: Mapping[str, Any], prefix: str
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        basic: dict[str, Any] = {}
        advanced: dict[str, Any] = {}
        for name, field in type(config).model_fields.items():
            if f"{prefix}{name}" in self.hidden:
                continue
            section = getattr(config, name)
            if isinstance(section, StageConfig):
                parts = self._split(section, values[name], f"{prefix}{name}.")
                for target, part in zip((basic, advanced), parts, strict=True):
                    target |= {name: part} if part else {}
            # What the machine decides, such as dtype, is left to the machine that runs: the one that deploys may have no GPU.
            elif field.default_factory is None or name in config.model_fields_set:
                extra = field.json_schema_extra
                (basic if isinstance(extra, dict) and extra["basic"] else advanced)[name] = values[name]
        return basic, advanced


def merge_advanced(given: Any) -> Any:
    """Return settings with those below `advanced` put back into their sections.

    Example: {"train": {"lr": 1e-6}, "advanced": {"train": {"weight_decay": 0.1}}} gives {"train": {"lr": 1e-6, "weight_decay": 0.1}}.
    """
    if not isinstance(given, Mapping) or ADVANCED not in given:
        return given
    others = {name: value for name, value in given.items() if name != ADVANCED}
    return merge_settings(others, given[ADVANCED] or {})


def inline_definitions(shape: Any, definitions: Mapping[str, Any]) -> Any:
    """Return a JSON schema with every $ref replaced by its definition, so that one section can be shown in part."""
    if isinstance(shape, list):
        return [inline_definitions(each, definitions) for each in shape]
    if not isinstance(shape, dict):
        return shape
    target = definitions[shape["$ref"].rpartition("/")[2]] if "$ref" in shape else {}
    joined = target | {name: value for name, value in shape.items() if name not in ("$ref", "$defs")}
    return {name: inline_definitions(value, definitions) for name, value in joined.items()}


def _drop(section: dict[str, Any], hidden: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Return a section's JSON schema without the settings and sections in `hidden`, which are dotted names."""
    properties = {
        name: _drop(field, hidden, f"{prefix}{name}.") if "properties" in field else field
        for name, field in section["properties"].items()
        if f"{prefix}{name}" not in hidden
    }
    return section | {"properties": properties}


def _show_arguments(section: dict[str, Any]) -> dict[str, Any]:
    """Return a section's JSON schema in which settings that name an environment show the typed arguments of those of Rollmill.

    Prefect's UI has a tab for each form of such a setting: name alone, name and arguments as JSON, each environment with arguments.
    """
    properties: dict[str, Any] = {}
    for name, field in section["properties"].items():
        if "properties" in field:
            properties[name] = _show_arguments(field)
        elif "properties" in field.get("items", {}):
            properties[name] = field | {"items": _show_arguments(field["items"])}
        elif name in ("environment", "problems") and "anyOf" in field:
            properties[name] = field | {
                "anyOf": [*field["anyOf"], *map(_describe_environment, WITH_ARGUMENTS)]
            }
        else:
            properties[name] = field
    return section | {"properties": properties}


def _describe_environment(name: str) -> dict[str, Any]:
    arguments = describe_environment_arguments(name) | {"title": "Arguments"}
    named = {"title": "Name", "type": "string", "enum": [name], "default": name}
    return {
        "title": name,
        "type": "object",
        "properties": {"name": named, "args": arguments},
        "required": ["name"],
        "additionalProperties": False,
    }


def _show_overrides(shown: dict[str, Any]) -> dict[str, Any]:
    """Return a form's JSON schema in which an environment has only what may differ from the run, without defaults.

    Prefect fills in defaults, and each of them would override the run's value.
    """
    properties = dict(shown["properties"])
    if entries := properties.get("environments"):
        items = {
            name: _drop_defaults(field, f"{name}.") if "properties" in field else field
            for name, field in entries["items"]["properties"].items()
        }
        properties["environments"] = entries | {"items": entries["items"] | {"properties": items}}
    return shown | {"properties": properties}


def _drop_defaults(section: dict[str, Any], prefix: str) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, field in section["properties"].items():
        path = f"{prefix}{name}"
        if "properties" in field:
            inner = _drop_defaults(field, f"{path}.")
            properties |= {name: inner} if inner["properties"] else {}
        elif may_differ(path):
            properties[name] = {key: value for key, value in field.items() if key != "default"}
    return {key: value for key, value in section.items() if key != "default"} | {"properties": properties}


def _select(section: dict[str, Any], *, is_basic: bool) -> dict[str, Any]:
    """Return a section's JSON schema with only its basic settings, or only the others; sections left empty are omitted."""
    properties: dict[str, Any] = {}
    for name, field in section["properties"].items():
        if "properties" in field:
            inner = _select(field, is_basic=is_basic)
            properties |= {name: inner} if inner["properties"] else {}
        elif field["basic"] == is_basic:
            properties[name] = field
    # A section's default holds settings that are shown elsewhere; without it, pydantic fills in each setting's own.
    return {name: value for name, value in section.items() if name != "default"} | {"properties": properties}


def _number(section: dict[str, Any]) -> dict[str, Any]:
    """Return a section's JSON schema with a `position` in each field, by which Prefect sorts the fields."""
    properties = {
        name: (_number(field) if "properties" in field else field) | {"position": position}
        for position, (name, field) in enumerate(section["properties"].items())
    }
    return section | {"properties": properties}


_NOT_EVALUATED = {
    name for name, is_fixed in settings().items() if name.startswith("train.") and not is_fixed
} - {"train.command_timeout_s"}
_NOT_SAMPLED = {
    f"rollout.{name}" for name in ("replay", "max_staleness", "max_refill_groups", "trajectories_per_task")
}

POST_TRAIN = RunForm(RunConfig, frozenset({"retrain"}))
COLLECT = RunForm(RunConfig, UNREAD_BY_COLLECT | {"rollout.replay"})
EVALUATE = RunForm(RunConfig, frozenset({"checkpoint", "sync", "retrain", *_NOT_EVALUATED}))
RETRAIN = RunForm(RunConfig, frozenset({"environments", *_NOT_SAMPLED}))
RESCORE = RunForm(RescoreConfig)
ANNOTATE = RunForm(AnnotateConfig)

FORMS = {
    "post-train": POST_TRAIN,
    "collect": COLLECT,
    "evaluate": EVALUATE,
    "retrain": RETRAIN,
    "improve": RETRAIN,
    "rescore": RESCORE,
    "annotate": ANNOTATE,
}
"""The form of each flow, by the flow's name."""

PostTrainSettings = Annotated[RunConfig, BeforeValidator(merge_advanced), WithJsonSchema(POST_TRAIN.schema())]
CollectSettings = Annotated[RunConfig, BeforeValidator(merge_advanced), WithJsonSchema(COLLECT.schema())]
EvaluateSettings = Annotated[RunConfig, BeforeValidator(merge_advanced), WithJsonSchema(EVALUATE.schema())]
RetrainSettings = Annotated[RunConfig, BeforeValidator(merge_advanced), WithJsonSchema(RETRAIN.schema())]
RescoreSettings = Annotated[RescoreConfig, BeforeValidator(merge_advanced), WithJsonSchema(RESCORE.schema())]
AnnotateSettings = Annotated[
    AnnotateConfig, BeforeValidator(merge_advanced), WithJsonSchema(ANNOTATE.schema())
]
