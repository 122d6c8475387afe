"""Fixtures for tests of Triton kernels: on an accelerator if there is one, else on the host in Triton's interpreter.

Triton reads the choice when kernels are first imported, so it is made here, for a ``conftest.py`` to import.
"""

from __future__ import annotations

import inspect
import os
import sys
import types
from dataclasses import replace
from functools import cache
from importlib.metadata import version

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:
    if "triton" in sys.modules and not os.environ.get("TRITON_INTERPRET"):
        pytest.exit(
            "triton was imported before it was set to interpret; run these tests in a process of their own"
        )
    os.environ["TRITON_INTERPRET"] = "1"


class _Kept:
    """What the interpreter would undo after a launch, left as it is."""

    def restore(self) -> None:
        pass


def _spare_the_interpreter_what_has_no_effect() -> None:
    """More than half of the time of Triton's interpreter (3.7) goes into three things:

    - In every launch and in every call of a jitted function by another, `tl.max` among them, it replaces the functions
      of its language anew. Here nothing but interpreted kernels uses the language, so that the first replacement stays.
    - Without debugging it computes whether integers overflow, and looks at none of the answers.
    - It makes its table of types for each look into it.
    """
    from triton.runtime import interpreter

    patch, done = interpreter._patch_lang, set()

    def patch_once(fn: types.FunctionType) -> _Kept:
        languages = frozenset(name for name, value in fn.__globals__.items() if inspect.ismodule(value))
        if languages not in done:
            patch(fn)
            done.add(languages)
        return _Kept()

    interpreter._patch_lang = patch_once
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    look_up = interpreter._get_np_dtype
    kept_look_up = cache(look_up)
    interpreter._get_np_dtype = lambda t: look_up(t) if t.scalar.is_ptr() else kept_look_up(t.scalar)


if not HAS_GPU and version("triton").startswith("3.7."):
    _spare_the_interpreter_what_has_no_effect()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The host, and a GPU where there is one."""
    if request.param == "cuda" and not HAS_GPU:
        pytest.skip("no GPU on this machine")
    if request.param == "cpu" and HAS_GPU:
        pytest.skip("kernels are compiled for the GPU here, not interpreted")
    return torch.device(request.param)


@pytest.fixture
def gpu() -> torch.device:
    if not HAS_GPU:
        pytest.skip("no GPU on this machine")
    return torch.device("cuda")
