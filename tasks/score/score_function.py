"""Load a scorer by its import path, whatever kind of callable it is."""

import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rollmill.tasks.user_code.arguments import bind_arguments, list_altered_arguments, name_arguments

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


def find_signature(found: Any) -> tuple[Callable[..., Any], int]:
    """Return what takes a scorer's arguments, and how many arguments it has besides, by position."""
    if not inspect.isclass(found):
        return getattr(found, "score", found), 1
    from_config = getattr(found, "from_config", None)
    return (from_config, 1) if from_config else (found, 0)


def load_function(
    path: str, settings: Callable[[], Any], args: Mapping[str, Any], field: str = "score.scorer"
) -> ScoreFunction:
    """Load the scorer at an import path: a function, a class, or an object.

    A class takes the arguments when it is created, another scorer in each call. Those that differ from the defaults are part of the
    version.

    Example: load_function("rewards:length", ..., {}) for `def length(candidate)` has the name rewards.length and version 1.

    Args:
        path: package.module:attribute.
        settings: returns the ScoreConfig, for a class with `from_config`.
        args: its arguments by name.
        field: the setting that names it, for errors.

    Raises:
        ConfigError: an argument is unknown, missing, or of another type.
        Exception: whatever importing or creating it raises.
    """
    found, name = load_object(path), path.replace(":", ".")
    taker, n_positional = find_signature(found)
    bound = bind_arguments(field, taker, args, n_positional) if callable(taker) else {}
    if inspect.isclass(found):
        with name_arguments(field, args):
            made = taker(settings(), **bound) if n_positional else taker(**bound)
        function = describe_function(made, name)
    else:
        function = describe_function(found, name, bound)
    altered = list_altered_arguments(taker, bound, n_positional) if bound else {}
    if not altered:
        return function
    values = {each: _to_json(value, args.get(each)) for each, value in altered.items()}
    digest = settings_version([json.dumps(values, sort_keys=True)])
    return replace(function, version=f"{function.version}-{digest}")


def _to_json(value: Any, given: Any) -> Any:
    """Return a converted argument as a JSON value; `given` if it has none, or none whose order is fixed."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return given
    return value


def describe_function(owner: Any, name: str, arguments: Mapping[str, Any] | None = None) -> ScoreFunction:
    """Return the ScoreFunction of a function, or of an object with a `score` method; `name` is used unless it declares one.

    Each call has `arguments` by name.

    Raises:
        TypeError: it cannot be called.
    """
    call = getattr(owner, "score", owner)
    if not callable(call):
        raise TypeError("expected a function, or a class or object with a method `score`")
    with_arguments = partial(call, **arguments) if arguments else call
    _check_arguments(with_arguments)
    return ScoreFunction(
        name=str(getattr(owner, "name", name)),
        version=str(getattr(owner, "version", DEFAULT_VERSION)),
        call=with_arguments,
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
