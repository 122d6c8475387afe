"""`Trace`: what the caller of one stream saw of it. Chunks are looked at, not parsed: a load generator that parsed each
of thousands a second would measure itself."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

# Inside a JSON string a quote follows a backslash, so text cannot look like one of these members.
_CARRIES_TOKENS = re.compile(
    rb'"(?:text|content|reasoning_content)"\s*:\s*"[^"]|"token_ids"\s*:\s*\[\s*\d'
).search
_HAS_USAGE = re.compile(rb'"usage"\s*:\s*\{').search
_IS_ERROR = re.compile(rb'"error"\s*:\s*["{]').search


@dataclass
class Trace:
    """One request. Moments are of `time.perf_counter`."""

    started_s: float
    token_times_s: list[float] = field(default_factory=list)
    """Arrival of each chunk that carried text or token ids."""
    ended_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    """As the server counts them; the number of chunks where it does not."""
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.started_s

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.token_times_s, self.token_times_s[1:])]

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first, whatever chunks they came in."""
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.num_output_tokens - 1)

    async def follow(self, reads: AsyncIterator[bytes]) -> None:
        """Takes a whole answer in, as it comes from the socket. ``ValueError`` for what is no JSON."""
        rest, is_done = b"", False
        async for data in reads:
            now_s = time.perf_counter()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                is_done = is_done or line[5:].strip() == b"[DONE]"
                self._take(line, now_s)
        if not is_done and self.error is None:
            self.error = "the stream ended without [DONE]"
        self.num_output_tokens = self.num_output_tokens or len(self.token_times_s)

    def _take(self, line: bytes, now_s: float) -> None:
        if _CARRIES_TOKENS(line):
            self.token_times_s.append(now_s)
        if _HAS_USAGE(line):
            usage = json.loads(line[5:])["usage"]
            self.num_prompt_tokens, self.num_output_tokens = (
                usage["prompt_tokens"],
                usage["completion_tokens"],
            )
        elif _IS_ERROR(line):
            error = json.loads(line[5:])["error"]
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)[:300]
