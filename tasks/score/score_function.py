"""Load a scorer by its import path, whatever kind of callable it is."""

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
    """A scorer and how to call it: its name, version and function, and what the function takes.

    Attributes:
        call: takes a Candidate, or a list of them if `by_group`.
        is_async: True if the result of `call` must be awaited.
        owner: the object that `call` belongs to, or the function itself.
        keeps_state: what it declares: True if a reward may depend on earlier calls, False if it does not; None: nothing.
    """

    name: str
    version: str
    call: Callable[..., Any]
    by_group: bool
    is_async: bool
    owner: Any
    keeps_state: bool | None = None

    @property
    def key(self) -> str:
        """NAME@VERSION under which its scores are stored."""
        return f"{self.name}@{self.version}"


def load_object(path: str) -> Any:
    """Import `package.module:attribute` and return the attribute.

    Raises:
        ValueError: the path has no attribute.
        Exception: whatever the import raises.
    """
    module, _, attribute = path.partition(":")
    if not attribute:
        raise ValueError("expected package.module:attribute")
    return getattr(importlib.import_module(module), attribute)


def load_function(path: str, settings: Callable[[], Any]) -> ScoreFunction:
    """Load the scorer at an import path: a function, a class, or an object.

    Example: load_function("rewards:length", ...) for `def length(candidate)` has the name rewards.length and version 1.

    Args:
        path: package.module:attribute.
        settings: returns the ScoreConfig, for a class with `from_config`; other classes are created without arguments.

    Raises:
        Exception: whatever importing or creating it raises.
    """
    found = load_object(path)
    if inspect.isclass(found):
        from_config = getattr(found, "from_config", None)
        found = from_config(settings()) if from_config else found()
    return describe_function(found, path.replace(":", "."))


def describe_function(owner: Any, name: str) -> ScoreFunction:
    """Return the ScoreFunction of a function, or of an object with a `score` method; `name` is used unless it declares one.

    Raises:
        TypeError: it cannot be called.
    """
    call = getattr(owner, "score", owner)
    if not callable(call):
        raise TypeError("expected a function, or a class or object with a method `score`")
    _check_arguments(call)
    return ScoreFunction(
        name=str(getattr(owner, "name", name)),
        version=str(getattr(owner, "version", DEFAULT_VERSION)),
        call=call,
        by_group=bool(getattr(owner, "by_group", False)),
        # A callable object is asynchronous if its `__call__` is.
        is_async=inspect.iscoroutinefunction(call)
        or inspect.iscoroutinefunction(getattr(call, "__call__", None)),  # noqa: B004 - is it async, not callable
        owner=owner,
        keeps_state=getattr(owner, "keeps_state", None),
    )


def _check_arguments(call: Callable[..., Any]) -> None:
    """Raise TypeError if a scorer cannot be called with one argument, its candidate or candidates."""
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        # What is written in C need not say what it takes; then its first call does.
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise TypeError(f"it is called with one argument, what it scores: {error}") from error


def settings_version(what: Sequence[object]) -> str:
    """Return a scorer's version as a hash of its settings, 8 hex digits: equal JSON values give equal versions."""
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:_DIGEST_CHARACTERS]
