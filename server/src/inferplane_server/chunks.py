"""The frame around the choices of a stream: encoded once a request, used for each token."""

from __future__ import annotations

from typing import Any

from inferplane.engine.output import CompletionDelta
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


def encode_choice(
    index: int,
    content: bytes,
    completion: CompletionDelta,
    *,
    logprobs: bytes = b"null",
    with_token_ids: bool = False,
) -> bytes:
    """One choice of a chunk. ``content`` is the member that holds its text, encoded: ``"text":"…"``, say."""
    ending = b"null"
    if completion.finish_reason is not None:
        ending = (
            encode_json(completion.finish_reason) + b',"stop_reason":' + encode_json(completion.stop_reason)
        )
    if with_token_ids:
        ending += b',"token_ids":' + encode_json(completion.token_ids)
    return b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b}' % (index, content, logprobs, ending)


def is_shown(completion: CompletionDelta) -> bool:
    """Whether there is anything to say of it: half a character, and what may be part of a stop string, is held back."""
    return bool(completion.text or completion.logprobs or completion.finish_reason)
