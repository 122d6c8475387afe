"""Ctrl-C between steps instead of within one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Inside, SIGINT waits for the yielded function to be called, which then raises `KeyboardInterrupt`; a second
    SIGINT raises at once. Does nothing outside the main thread, or where the program handles SIGINT itself."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield lambda: None
        return
    has_come = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal has_come
        if has_come:
            raise KeyboardInterrupt
        has_come = True

    def check() -> None:
        nonlocal has_come
        if has_come:
            has_come = False
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()
