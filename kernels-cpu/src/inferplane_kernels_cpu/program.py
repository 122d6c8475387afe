"""`Program`: calls of native ops that were recorded once, with their arguments, and are run again by one call."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from inferplane_kernels_cpu import native


class Program:
    """What ops were called with must stay valid as long as the program is run: memory, not values."""

    def __init__(self) -> None:
        self._handle = native.function("inferplane_new_program", returns=native.pointer)()
        self._run = native.function("inferplane_run_program", native.pointer)
        delete = native.function("inferplane_delete_program", native.pointer)
        weakref.finalize(self, delete, self._handle)

    def __len__(self) -> int:
        """The number of calls."""
        size = native.function("inferplane_program_size", native.pointer, returns=native.int64)
        return int(size(self._handle))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Ops that this thread calls meanwhile run as usual and are added. One program is recorded at a time."""
        record = native.function("inferplane_record", native.pointer)
        record(self._handle)
        try:
            yield
        finally:
            record(None)

    def run(self) -> None:
        self._run(self._handle)
