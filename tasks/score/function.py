"""A scorer by its import path, in one shape whatever kind of callable it is."""

import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

DEFAULT_VERSION = "1"
_DIGEST_CHARACTERS = 8


@dataclass(frozen=True, slots=True)
class ScoreFunction:
    """How to call a scorer.

    Attributes:
        call: takes a Candidate, or a list of them when `by_group`.
        is_async: True when what `call` returns is to be awaited.
        owner: the object that `call` belongs to, or the function itself.
    """

    name: str
    version: str
    call: Callable[..., Any]
    by_group: bool
    is_async: bool
    owner: Any

    @property
    def key(self) -> str:
        """NAME@VERSION, by which its scores are stored."""
        return f"{self.name}@{self.version}"


def loaded(path: str) -> Any:
    """What lies at an import path `package.module:attribute`; raises what the import raises."""
    module, _, attribute = path.partition(":")
    if not attribute:
        raise ValueError("expected package.module:attribute")
    return getattr(importlib.import_module(module), attribute)


def function_at(path: str, settings: Callable[[], Any]) -> ScoreFunction:
    """The scorer at an import path: a function, a class, or an object.

    Example: function_at("rewards:length", ScoreConfig) of `def length(candidate)` is called rewards.length, version 1.

    Args:
        path: package.module:attribute.
        settings: gives the ScoreConfig for a class with `from_config`; others are made without arguments.

    Raises:
        Exception: whatever importing or making it raises.
    """
    return function_of(_made(loaded(path), settings), path.replace(":", "."))


def _made(found: Any, settings: Callable[[], Any]) -> Any:
    if not inspect.isclass(found):
        return found
    from_config = getattr(found, "from_config", None)
    return from_config(settings()) if from_config else found()


def function_of(owner: Any, name: str) -> ScoreFunction:
    """Describe a function, or an object with `score`.

    Args:
        owner: the function or object.
        name: its name when it does not say one itself.

    Raises:
        TypeError: it cannot be called.
    """
    call = getattr(owner, "score", owner)
    if not callable(call):
        raise TypeError("expected a function, or a class or object with a method `score`")
    return ScoreFunction(
        name=str(getattr(owner, "name", name)),
        version=str(getattr(owner, "version", DEFAULT_VERSION)),
        call=call,
        by_group=bool(getattr(owner, "by_group", False)),
        is_async=inspect.iscoroutinefunction(call)
        or inspect.iscoroutinefunction(getattr(call, "__call__", None)),  # noqa: B004 - is it async, not callable
        owner=owner,
    )


def digest_of(what: Sequence[object]) -> str:
    """A version for what settings determine: the same for the same JSON values."""
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:_DIGEST_CHARACTERS]
