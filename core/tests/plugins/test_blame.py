from __future__ import annotations

import importlib

from inferplane.plugins.blame import Blame, blame
from toy_plugins import ToyIndex

SOURCE = """
import json

def raises():
    raise OSError("card busy")

def asks_a_library():
    json.loads("{")

def hands_over(call):
    call()
"""


def blamed(toys: ToyIndex, function: str, *args: object) -> Blame | None:
    toys.install("glow", SOURCE)
    try:
        getattr(importlib.import_module("toy_glow_module"), function)(*args)
    except Exception as error:
        return blame(error)
    raise AssertionError("nothing was raised")


def test_a_plugin_that_raises_is_named_with_the_place(toys: ToyIndex) -> None:
    fault = blamed(toys, "raises")
    assert fault is not None
    assert fault.message == (
        "plugin 'glow' (toy-glow 1.2.3) failed in raises (toy_glow_module.py, line 5): OSError: card busy"
    )
    assert "test_blame.py" not in fault.traceback
    assert fault.traceback.splitlines()[-1] == "OSError: card busy"


def test_what_a_library_says_is_the_plugin_s_that_called_it(toys: ToyIndex) -> None:
    fault = blamed(toys, "asks_a_library")
    assert fault is not None
    assert "failed in asks_a_library (toy_glow_module.py, line 8): JSONDecodeError" in fault.message
    assert "decoder.py" in fault.traceback


def test_what_the_core_raises_is_nobody_s(toys: ToyIndex) -> None:
    from inferplane.plugins.target import import_target

    assert blamed(toys, "hands_over", lambda: import_target("no target", "it")) is None
    assert blame(ValueError("raised by nobody")) is None
