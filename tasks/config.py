"""The base of every stage's configuration, and the one way to declare a setting, or a thing it names."""

import difflib
import importlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from tasks.errors import ConfigError

UNITS = {"s": "seconds", "mib": "MiB", "gib": "GiB", "bytes": "bytes", "env": "environment variable"}
SPOKEN = {
    "api": "API",
    "args": "arguments",
    "coef": "coefficient",
    "dtype": "type of numbers",
    "env": "environment",
    "eps": "epsilon",
    "gpu": "GPU",
    "gpus": "GPUs",
    "kl": "KL divergence",
    "kv": "KV",
    "lora": "LoRA",
    "lr": "learning rate",
    "max": "most",
    "min": "least",
    "mlflow": "MLflow",
    "n": "number of",
    "uri": "address",
    "url": "address",
    "urls": "addresses",
    "zero": "ZeRO",
}
LIMITS = {"ge": "At least", "gt": "Above", "le": "at most", "lt": "below"}
LONGEST_DEFAULT = 40
NO_SECRET = (
    "an address may hold no user name, password or key: settings are stored and shown; leave them out, and give them by "
    "the environment variables that docs/security.md names"
)
VARIABLE = "^([A-Z_][A-Z0-9_]*)?$"
"""Shape of an environment variable's name; a key that is given in its place has another one."""
_SECRET_ADDRESS = re.compile(
    r"://[^/\s@]+@|://[^@]*:[^@]*@|[?&][^=&]*(?:key|token|password|secret|signature)=", re.IGNORECASE
)


def spoken(name: str) -> str:
    """A setting's name as a form's title. Example: "request_timeout_s" is "Request timeout (seconds)"."""
    words = name.split("_")
    unit = UNITS.get(words[-1], "") if len(words) > 1 else ""
    text = " ".join(SPOKEN.get(word, word) for word in (words[:-1] if unit else words))
    return f"{text[0].upper()}{text[1:]}{unit and f' ({unit})'}"


def _title_of_section(model: type) -> str:
    """A section's title. Example: that of StartModelConfig is "Start model"."""
    return spoken(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", model.__name__.removesuffix("Config")).lower())


class StageConfig(BaseModel):
    """Frozen settings; an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        field_title_generator=lambda name, _: spoken(name),
        model_title_generator=_title_of_section,
    )

    @field_validator("*")
    @classmethod
    def _holds_no_secret(cls, value: Any) -> Any:
        """Settings are shown in logs and in Prefect, and stored in run.json: no password may come in by an address."""
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and "://" in text and _SECRET_ADDRESS.search(text):
                raise PydanticCustomError("secret", NO_SECRET)
        return value


def setting(default: Any, description: str, *, fixed: bool = False, **limits: Any) -> Any:
    """Declare one setting.

    Args:
        default: the value when none is given; `...` when one must be.
        description: meaning and unit; the UI's form shows it with range and default.
        fixed: True for what may not change when a run is resumed.
        limits: pydantic's `ge`, `gt`, `le`, `lt`, `min_length`, `pattern`, ...
    """
    shown = " ".join([description, *_notes(default, limits, fixed=fixed)])
    extra: dict[str, Any] = {"fixed": fixed, "description": shown}
    return Field(default, description=description, json_schema_extra=extra, **limits)


def variable(default: str, description: str) -> Any:
    """Declare a setting that names an environment variable which holds a secret; a wrong one is never repeated."""
    return setting(default, description, pattern=VARIABLE)


def _notes(default: Any, limits: Mapping[str, Any], *, fixed: bool) -> list[str]:
    """Sentences about a setting's range, default, and whether it stays. such as "At least 0, below 1"."""
    notes = []
    if bounds := [f"{text} {_number(limits[name])}" for name, text in LIMITS.items() if name in limits]:
        text = ", ".join(bounds)
        notes.append(f"{text[0].upper()}{text[1:]}.")
    if isinstance(default, bool):
        notes.append(f"Default: {'on' if default else 'off'}.")
    elif (
        default not in ("", ())
        and len(str(default)) <= LONGEST_DEFAULT
        and not isinstance(default, BaseModel)
    ):
        notes.append(f"Default: {_number(default)}.")
    return [*notes, "Stays when a run is gone on with."] if fixed else notes


def _number(value: Any) -> Any:
    """A whole number without its decimal point, anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def nearest(name: str, names: Iterable[str]) -> str:
    """The name that was meant, as the end of a message; empty when none is near. Example: "; did you mean mean_std?"."""
    matches = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def named(field: str, name: str, registered: Mapping[str, str]) -> Any:
    """What a setting names: a registered name, or an import path `package.module:attribute`.

    Raises:
        ConfigError: nothing can be imported under that name.
    """
    module, _, attribute = registered.get(name, name).partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise _unmakeable(field, name, registered, error) from error


def made_by_name(field: str, name: str, registered: Mapping[str, str]) -> Any:
    """Make what a setting names, without arguments.

    Raises:
        ConfigError: nothing can be imported under that name, or made without arguments.
    """
    factory = named(field, name, registered)
    try:
        return factory()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise _unmakeable(field, name, registered, error) from error


def _unmakeable(field: str, name: str, registered: Mapping[str, str], error: Exception) -> ConfigError:
    names = ", ".join(sorted(registered))
    remedy = f"give a registered name ({names}) or an import path package.module:Class ({error}){nearest(name, registered)}"
    return ConfigError(field, name, remedy)
