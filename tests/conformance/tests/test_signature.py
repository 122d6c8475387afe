"""An override that callers of the base cannot use is named."""

from __future__ import annotations

from typing import Any

import pytest

from inferplane_conformance.signature import overrides_that_do_not_fit


class Base:
    def plain(self, a: int, b: int = 0) -> None: ...

    def keyword(self, a: int, *, sinks: Any = None) -> None: ...

    @classmethod
    def of_class(cls, a: int) -> None: ...


class Fits(Base):
    def plain(self, a: int, b: int = 1, c: int = 2) -> None: ...

    def keyword(self, *args: Any, **kwargs: Any) -> None: ...

    @classmethod
    def of_class(cls, a: int, more: int = 0) -> None: ...


def derived(**members: Any) -> type:
    return type("Derived", (Base,), members)


def test_what_fits_is_left_alone():
    assert overrides_that_do_not_fit(Fits, Base) == []


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"plain": lambda self, a: None}, "too many positional"),
        ({"plain": lambda self, a, b: None}, "missing a required argument: 'b'"),
        ({"plain": lambda self, x, b=0: None}, "missing a required argument: 'x'"),
        ({"keyword": lambda self, a: None}, "unexpected keyword argument 'sinks'"),
        ({"of_class": lambda cls, a: None}, "should be a classmethod"),
        ({"plain": 3}, "is no method"),
    ],
)
def test_what_does_not_fit_is_named(members: dict[str, Any], message: str):
    [fault] = overrides_that_do_not_fit(derived(**members), Base)
    assert message in fault
