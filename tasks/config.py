"""The base of every stage's configuration, and the one way to declare a setting, or a thing it names."""

import difflib
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rollmill.tasks.errors import ConfigError, user_error_text

UNITS = {"s": "seconds", "env": "environment variable"}
# Abbreviations in names of settings, as a form's titles have them.
TITLE_WORDS = {
    "api": "API",
    "args": "arguments",
    "coef": "coefficient",
    "env": "environment",
    "gpu": "GPU",
    "gpus": "GPUs",
    "kl": "KL",
    "len": "length",
    "lora": "LoRA",
    "lr": "learning-rate",
    "mlflow": "MLflow",
    "n": "number of",
    "otlp": "OTLP",
    "uri": "URI",
    "url": "URL",
    "urls": "URLs",
    "zero": "ZeRO",
}
LIMITS = {"ge": "At least", "gt": "Above", "le": "at most", "lt": "below"}
LONGEST_DEFAULT = 40
YEAR_S = 31_536_000.0
"""Upper bound of time limits, in seconds: libraries overflow far above it."""
NO_SECRET = (
    "an address may hold no user name, password or key: settings are stored and shown; leave them out, and give them by "
    "the environment variables that docs/explanation/security.md names"
)
NO_SECRET_MEMBER = (
    "holds a key, password or token, and settings are stored and shown: have the environment read it from an environment "
    'variable, named by rollout.env_variables (some take the name as an argument, such as {"api_key_var": "NAME"})'
)
# Pattern of the name of an environment variable with a secret; a key given instead of a name does not match it.
VARIABLE = "^(ROLLMILL_[A-Z0-9_]+|[A-Z][A-Z0-9_]*_(KEY|TOKEN))?$"
# Pattern of an environment variable's name, or of the beginning of several names.
VARIABLES = r"^([A-Za-z_][A-Za-z0-9_]*\*?|\*)$"
# Secrets of services that Rollmill itself uses: no setting may have them sent to an address.
RESERVED_VARIABLES = ("AWS_", "MLFLOW_", "PREFECT_", "ROLLMILL_TRAINER_")
# Start of a service's address, or no address.
ADDRESS = "^(https?://|$)"
# An address that pages link to: in Markdown nothing of it ends the link or is HTML.
LINK = r"""^(https?://[^\s<>()\[\]{}"'`\\|]+)?$"""
Address = Annotated[str, Field(pattern=ADDRESS)]
HeadDtype = Literal["float32", "model"]
# A GPU by its position among the visible ones, or by UUID; YAML and `--set` read [0,1] as numbers.
Gpu = Annotated[str, BeforeValidator(lambda given: str(given) if type(given) is int else given)]
LARGEST_INTEGER = 2**63 - 1
# NUL ends a path, and a lone surrogate is no character of UTF-8.
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_SECRET_ADDRESS = re.compile(
    r"://[^/\s@]+@|://[^@]*:[^@]*@|[?&](?:sig|code|[^=&]*(?:key|token|password|secret|signature|credential))=",
    re.IGNORECASE,
)
# A member of a JSON object with a secret as its value; the name of a variable ("api_key_var") or a special token is none.
_SECRET_MEMBER = re.compile(
    r"""["'](?:[\w-]*(?:api[_-]?key|(?:secret|access|private)[_-]?key|password|passwd|passphrase|secret|credentials?|authorization)
    |[\w-]*(?:anthropic|azure|gemini|github|gitlab|google|hf|openai|slack|wandb)[_-]?(?:key|token)|auth|bearer|cookie
    |(?:[\w-]*(?:access|api|auth|bearer|refresh|session)[_-]?)?token)["']\s*:\s*["'][^"']""",
    re.IGNORECASE | re.VERBOSE,
)
# A setting, known or not, whose value may be a secret.
_SECRET_SETTING = re.compile("key|token(?!s)|password|secret|env_variables", re.IGNORECASE)


_SHORTEST_KEY = 6


def make_title(name: str) -> str:
    """Return the title that a form shows for a setting. Example: "request_timeout_s" gives "Request timeout (seconds)".

    A learning rate has a hyphen before another word alone: "Learning rate", "Min learning-rate ratio".
    """
    words = name.split("_")
    unit = UNITS.get(words[-1], "") if len(words) > 1 else ""
    text = " ".join(TITLE_WORDS.get(word, word) for word in (words[:-1] if unit else words))
    text = re.sub(r"learning-rate$", "learning rate", text)
    return f"{text[0].upper()}{text[1:]}{unit and f' ({unit})'}"


def _make_section_title(model: type) -> str:
    """Return the title that a form shows for a section. Example: that of StartModelConfig is "Start model"."""
    return make_title(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", model.__name__.removesuffix("Config")).lower())


def may_be_secret(field: str, value: object) -> bool:
    """Return True if the value given for a setting may be a secret, by the setting's name or by what the value holds."""
    if isinstance(value, list | tuple):
        return any(may_be_secret(field, each) for each in value)
    text = str(value)
    # A short number is none.
    if not isinstance(value, str | dict) and len(text) < _SHORTEST_KEY:
        return False
    return bool(_SECRET_SETTING.search(field) or "--api" in text or find_secret(text))


def find_secret(text: str) -> str:
    """Return why a text may be no setting: it is an address or has a JSON object with a secret; empty if it has none."""
    if "://" in text and _SECRET_ADDRESS.search(text):
        return NO_SECRET
    return NO_SECRET_MEMBER if "{" in text and _SECRET_MEMBER.search(text) else ""


class StageConfig(BaseModel):
    """Base of all sections of settings: frozen, and an unknown key, NaN or infinity is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        field_title_generator=lambda name, _: make_title(name),
        model_title_generator=_make_section_title,
    )

    @model_validator(mode="before")
    @classmethod
    def _may_be_empty(cls, values: Any) -> Any:
        """Return the section's settings: none for `train:` in YAML with nothing below it."""
        return {} if values is None else values

    @field_validator("*")
    @classmethod
    def _holds_no_secret(cls, value: Any) -> Any:
        """Return the setting's value; raise an error if it is an address, or a JSON object, with a password or a key."""
        # Settings are shown in logs and in Prefect, and stored in run.json.
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and (remedy := find_secret(text)):
                raise PydanticCustomError("secret", "{remedy}", {"remedy": remedy})
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _is_storable(cls, value: Any, info: ValidationInfo) -> Any:
        """Return the setting's value; raise an error for one that cannot be stored, or that YAML and pydantic would reinterpret."""
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, str) and _UNSTORABLE.search(each):
                raise PydanticCustomError("text", "a text may hold no NUL and no half of a character")
            if isinstance(each, int) and abs(each) > LARGEST_INTEGER:
                raise PydanticCustomError("integer", "the number is too large for an integer of 64 bits")
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation in (int, float):
            raise PydanticCustomError("number", "give a number, not true or false")
        return value


def setting(
    default: Any,
    description: str,
    *,
    fixed: bool = False,
    basic: bool = False,
    **limits: Any,
) -> Any:
    """Declare one setting of a StageConfig.

    Args:
        default: the value when none is given; `...` when one must be; a function, when the machine decides.
        description: meaning and unit; the UI's form shows it with range and default.
        fixed: True for what cannot change when a run is resumed.
        basic: True for what most runs set; forms show it first.
        limits: pydantic's `ge`, `gt`, `le`, `lt`, `min_length`, `pattern`, ...
    """
    shown = " ".join([description, *_notes(default, limits, fixed=fixed)])
    extra: dict[str, Any] = {"fixed": fixed, "basic": basic, "description": shown}
    given: dict[str, Any] = {"default_factory": default} if callable(default) else {"default": default}
    return Field(**given, description=description, json_schema_extra=extra, **limits)


def choose_dtype(devices: Path = Path("/dev")) -> str:
    """Return the number format of weights on this machine: bfloat16 with an NVIDIA GPU, else float32."""
    # Device files, because importing torch to ask it takes seconds.
    return "bfloat16" if any(devices.glob("nvidia[0-9]*")) else "float32"


def refuse_reserved_variable(name: str) -> str:
    """Return the name of an environment variable with a secret; raise an error if it is one of RESERVED_VARIABLES."""
    if name.startswith(RESERVED_VARIABLES):
        remedy = f"variables {', '.join(f'{each}*' for each in RESERVED_VARIABLES)} are never sent to an address; give another"
        raise PydanticCustomError("reserved_variable", "{remedy}", {"remedy": remedy})
    return name


SecretVariable = Annotated[str, AfterValidator(refuse_reserved_variable)]
VariablePattern = Annotated[str, Field(pattern=VARIABLES)]


def _notes(default: Any, limits: Mapping[str, Any], *, fixed: bool) -> list[str]:
    """Return sentences about a setting's range, its default and whether it is fixed. Example: "At least 0, below 1."."""
    notes = []
    if bounds := [f"{text} {_number(limits[name])}" for name, text in LIMITS.items() if name in limits]:
        text = ", ".join(bounds)
        notes.append(f"{text[0].upper()}{text[1:]}.")
    if isinstance(default, bool):
        notes.append(f"Default: {'on' if default else 'off'}.")
    elif (
        default is not ...
        and not callable(default)
        and str(default) not in ("", "()")
        and len(str(default)) <= LONGEST_DEFAULT
        and not isinstance(default, StageConfig)
    ):
        notes.append(f"Default: {_number(default)}.")
    return [*notes, "Cannot change when a run is resumed."] if fixed else notes


def _number(value: Any) -> Any:
    """Return a float without fraction as an int, anything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def suggest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the end of a message that suggests the most similar name, as "; did you mean mean_std?"; empty if none is."""
    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f"; did you mean {matches[0]}?" if matches else ""


def describe_invalid(error: ValidationError, *above: str) -> str:
    """Describe the first value that a model refuses; `above` is the place of the model. Example: "steps.0.n: Field required"."""
    first = error.errors()[0]
    return f"{'.'.join([*above, *map(str, first['loc'])]) or 'the whole'}: {first['msg']}"


@cache
def find_plugins(kind: Literal["advantages", "environments", "losses", "scorers"]) -> Mapping[str, str]:
    """Return the import paths, by name, of what installed distributions register: their entry points of the group rollmill.KIND.

    Example: {"brevity": "my_package.rewards:brevity"} of `[project.entry-points."rollmill.scorers"]` with
    `brevity = "my_package.rewards:brevity"`.
    """
    return {each.name: f"{each.module}:{each.attr}" for each in entry_points(group=f"rollmill.{kind}")}


def import_named(field: str, name: str, registered: Mapping[str, str]) -> Any:
    """Import what a setting names: a registered name, or an import path `package.module:attribute`.

    Args:
        field: the setting, for errors.
        name: its value.
        registered: import path of each registered name.

    Raises:
        ConfigError: nothing can be imported under that name.
    """
    module, _, attribute = registered.get(name, name).partition(":")
    with guard_named(field, name, registered):
        return getattr(importlib.import_module(module), attribute)


def create_named(field: str, name: str, registered: Mapping[str, str]) -> Any:
    """Import the class or function that a setting names, as `import_named` does, and return what a call without arguments returns.

    Raises:
        ConfigError: nothing can be imported under that name, or the call fails.
    """
    factory = import_named(field, name, registered)
    with guard_named(field, name, registered):
        return factory()


@contextmanager
def guard_named(field: str, name: str, registered: Mapping[str, str]) -> Iterator[None]:
    """Convert what the module or the class that a setting names raises to a ConfigError, SystemExit too."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        # Foreign code: whatever it raises.
        names, why = ", ".join(sorted(registered)), f"{type(error).__name__}: {user_error_text(error)}"
        remedy = f"{why}; give a registered name ({names}) or an import path package.module:Class{suggest(name, registered)}"
        raise ConfigError(field, name, remedy) from error


def check_extra(field: str, value: object, module: str, extra: str) -> None:
    """Raise ConfigError with the command that installs the extra if the library `module` is missing."""
    try:
        is_there = find_spec(module) is not None
    except ModuleNotFoundError:
        # Not even its parent package is installed.
        is_there = False
    if not is_there:
        raise ConfigError(field, value, f"needs {module}: pip install 'rollmill[{extra}]'")
