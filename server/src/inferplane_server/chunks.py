"""The frame around the choices of a stream: encoded once a request, used for each token."""

from __future__ import annotations

from typing import Any

from inferplane_server.generation import Usage
from inferplane_server.protocol.sampling import StreamOptions
from inferplane_server.sse import DONE, encode_json


class ChunkFrame:
    """Puts choices, which are encoded already, into whole events."""

    def __init__(self, header: dict[str, Any], options: StreamOptions | None, usage: Usage) -> None:
        """``header`` is what every chunk says of its response: id, object, created, model, system_fingerprint."""
        self._head = b"data: " + encode_json(header)[:-1] + b',"choices":['
        self._usage = usage
        self._counts_at_end = options is not None and options.include_usage
        self._counts_always = options is not None and options.continuous_usage_stats

    def chunk(self, choice: bytes) -> bytes:
        return self._head + choice + self._tail()

    def _tail(self) -> bytes:
        if self._counts_always:
            return b'],"usage":' + encode_json(self._usage.as_dict()) + b"}\n\n"
        return b'],"usage":null}\n\n' if self._counts_at_end else b"]}\n\n"

    def end(self) -> bytes:
        """The chunk with the usage, if it was asked for, and the end mark."""
        if not self._counts_at_end:
            return DONE
        return self._head + b'],"usage":' + encode_json(self._usage.as_dict()) + b"}\n\n" + DONE
