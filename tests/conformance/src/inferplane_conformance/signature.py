"""Whether a method can be called in every way in which the one that it overrides can."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any


def overrides_that_do_not_fit(derived: type, base: type) -> list[str]:
    """A line for each method of ``derived`` that callers of ``base`` cannot use. Only public ones are looked at."""
    faults = []
    for name, method in vars(base).items():
        own = inspect.getattr_static(derived, name)
        if name.startswith("_") or own is method:
            continue
        wanted_callable, own_callable = _function(method), _function(own)
        if wanted_callable is None:
            continue
        if own_callable is None:
            faults.append(f"{derived.__name__}.{name} is no method")
            continue
        if type(method) in (classmethod, staticmethod) and type(own) is not type(method):
            faults.append(f"{derived.__name__}.{name} should be a {type(method).__name__}")
            continue
        wanted, found = inspect.signature(wanted_callable), inspect.signature(own_callable)
        if (fault := _misfit(wanted, found)) is not None:
            faults.append(f"{derived.__name__}.{name}{found} should be callable as {name}{wanted}: {fault}")
    return faults


def _misfit(wanted: inspect.Signature, found: inspect.Signature) -> str | None:
    parameters = list(wanted.parameters.values())
    positional = [
        p for p in parameters if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    keyword_only = [p for p in parameters if p.kind is Parameter.KEYWORD_ONLY]
    required = [p for p in positional if p.default is Parameter.empty]
    try:
        found.bind(*(p.name for p in positional), **{p.name: None for p in keyword_only})
        found.bind(*(p.name for p in required), **_required_keywords(keyword_only))
        # callers may name any parameter that they can see, but for the instance or class
        named = {p.name: None for p in positional[1:] if p.kind is Parameter.POSITIONAL_OR_KEYWORD}
        found.bind(
            *(p.name for p in positional[: len(positional) - len(named)]),
            **named,
            **_required_keywords(keyword_only),
        )
    except TypeError as error:
        return str(error)
    return None


def _required_keywords(parameters: list[Parameter]) -> dict[str, None]:
    return {p.name: None for p in parameters if p.default is Parameter.empty}


def _function(member: object) -> Callable[..., Any] | None:
    if isinstance(member, (classmethod, staticmethod)):
        return member.__func__
    return member if inspect.isfunction(member) else None
