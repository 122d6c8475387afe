"""`ScriptedEngine` stands in for `AsyncEngine`: tokens are a function of the prompt, delays and faults the test's."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from inferplane.config import DeviceConfig, EngineConfig, ModelConfig, PoolerConfig
from inferplane.engine.errors import EmptyPromptError, EngineDeadError, PromptTooLongError
from inferplane.engine.output import CompletionDelta, RequestDelta
from inferplane.engine.stats import EngineStats
from inferplane.request import FinishReason, PoolingParams, PositionLogprobs, SamplingParams, TokenLogprob
from inferplane.tokenizer import Tokenizer
from inferplane.tokenizer.token_bytes import BYTE_OF_CHARACTER

TEMPLATE = """\
{% for m in messages %}<{{ m.role }}>{{ m.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
EOS_ID = 256
VOCAB_SIZE = 257
NUM_BLOCKS = 64


def byte_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """One token for each byte, whose id is the byte, and an end token."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(BYTE_OF_CHARACTER), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<end>", special=True)])
    templates = {"default": template} if template else None
    return Tokenizer(backend, special_tokens={"eos_token": "<end>"}, chat_templates=templates)


def answer_tokens(prompt_token_ids: list[int], index: int, length: int) -> list[int]:
    """The letters that the engine answers with."""
    state = zlib.crc32(bytes(token % 256 for token in prompt_token_ids)) + index
    letters = []
    for _ in range(length):
        state = (state * 1103515245 + 12345) % 2**31
        letters.append(ord("a") + (state >> 16) % 26)
    return letters


def pooled_vector(prompt_token_ids: list[int], size: int) -> list[float]:
    """What the engine makes of a prompt: how often each token comes, by the remainder of its id."""
    vector = [0.0] * size
    for token_id in prompt_token_ids:
        vector[token_id % size] += 1.0
    return vector


def answer_text(prompt: str, length: int, index: int = 0) -> str:
    return bytes(answer_tokens(list(prompt.encode()), index, length)).decode()


@dataclass
class ScriptedEngine:
    delay_s: float = 0.0
    """Before each token."""
    script: list[int] | None = None
    """Tokens to answer with in place of `answer_tokens`."""
    refusal: Exception | None = None
    """Raised by the first ``__anext__``."""
    fail_after: int | None = None
    """Tokens after which a request ends with an error."""
    die_after: int | None = None
    """Tokens after which the engine raises `EngineDeadError`."""
    late_prompt_logprobs: bool = False
    """The first completion, which carries the prompt's log-probabilities, starts one event after the others."""
    logprob: float = -0.5
    fault: str | None = None
    """What `check_health` complains about."""
    is_ready: bool = True
    max_model_len: int = 128
    template: str | None = TEMPLATE
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    pooler: PoolerConfig | None = None
    """Of an engine that pools in place of generating: see `pooled_vector`."""
    running: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    seen: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = byte_tokenizer(self.template)
        model = ModelConfig(
            model="fake", path="/nowhere", hf_config={}, architecture="Fake", dtype="float32",
            max_model_len=self.max_model_len, vocab_size=VOCAB_SIZE, pooler=self.pooler,
        )  # fmt: skip
        self.config = EngineConfig(model=model, device=DeviceConfig(platform="fake"))

    async def wait_ready(self) -> None:
        while not self.is_ready:
            await asyncio.sleep(0.01)

    def check_health(self) -> None:
        if self.fault:
            raise EngineDeadError(self.fault)

    async def encode_prompt(self, prompt: str, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(prompt, add_special_tokens)

    def stats(self) -> EngineStats:
        num_running = len(self.running)
        return msgspec.structs.replace(
            EngineStats.at_start(),
            num_running=num_running,
            num_blocks=NUM_BLOCKS,
            num_free_blocks=NUM_BLOCKS - num_running,
        )

    async def pool(
        self,
        prompt_token_ids: list[int],
        params: PoolingParams,
        *,
        request_id: str,
        second_text_start: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestDelta:
        if self.refusal:
            raise self.refusal
        self.seen.append(
            {
                "params": params,
                "priority": priority,
                "cache_salt": cache_salt,
                "prompt": prompt_token_ids,
                "second_text_start": second_text_start,
            }
        )
        self.running.add(request_id)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.aborted.append(request_id)
            raise
        finally:
            self.running.discard(request_id)
        if self.fail_after == 0:
            failed = CompletionDelta(0, "", [], finish_reason=FinishReason.ERROR, error="a planned fault")
            return RequestDelta(request_id, [failed], len(prompt_token_ids), finished=True)
        assert self.pooler is not None, "the route should have refused the task"
        vector = pooled_vector(prompt_token_ids, len(self.pooler.labels) or self.pooler.max_dimensions)
        data = struct.pack(f"<{len(vector)}f", *vector)
        return RequestDelta(request_id, [], len(prompt_token_ids), finished=True, pooled=data)

    async def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> AsyncGenerator[RequestDelta, None]:
        if self.refusal:
            raise self.refusal
        token_ids = (
            await self.encode_prompt(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
        )
        if not token_ids:
            raise EmptyPromptError
        if len(token_ids) >= self.max_model_len:
            raise PromptTooLongError(len(token_ids), self.max_model_len)
        self.seen.append(
            {"params": params, "priority": priority, "cache_salt": cache_salt, "prompt": token_ids}
        )
        self.running.add(request_id)
        is_done = False
        try:
            async for delta in self._answer(request_id, token_ids, params):
                is_done = delta.finished
                if is_done:
                    self.running.discard(request_id)
                yield delta
        finally:
            self.running.discard(request_id)
            if not is_done:
                self.aborted.append(request_id)

    async def _answer(
        self, request_id: str, prompt: list[int], params: SamplingParams
    ) -> AsyncGenerator[RequestDelta, None]:
        room = self.max_model_len - len(prompt)
        length = room if params.max_tokens is None else min(params.max_tokens, room)
        scripts = [self.script or answer_tokens(prompt, index, length) for index in range(params.n)]
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(self._position(token, params.prompt_logprobs) for token in prompt[1:])]
        num_cached = min(3, len(prompt) - 1)
        if length == 0:
            ends = [CompletionDelta(i, "", [], [], FinishReason.LENGTH) for i in range(params.n)]
            yield RequestDelta(request_id, ends, len(prompt), num_cached, prompt_logprobs, finished=True)
            return
        held: list[CompletionDelta] = []
        num_steps = min(length, len(scripts[0]))
        for position in range(num_steps):
            await asyncio.sleep(self.delay_s)
            if self.die_after == position:
                raise EngineDeadError("the engine's process ended")
            is_last = position == num_steps - 1
            deltas = [self._delta(i, scripts[i], position, params, is_last, length) for i in range(params.n)]
            if self.fail_after == position:
                deltas = [
                    replace(delta, finish_reason=FinishReason.ERROR, error="a planned fault")
                    for delta in deltas
                ]
            carries_prompt = position == (1 if self.late_prompt_logprobs else 0)
            if self.late_prompt_logprobs and position == 0:
                held, deltas = deltas[:1], deltas[1:]
            elif held:
                held, deltas = [], held + deltas
            yield RequestDelta(
                request_id,
                deltas,
                len(prompt),
                num_cached,
                prompt_logprobs if carries_prompt else None,
                finished=is_last,
            )

    def _delta(
        self, index: int, script: list[int], position: int, params: SamplingParams, is_last: bool, length: int
    ) -> CompletionDelta:
        token = script[position]
        reason = None
        if is_last:
            reason = FinishReason.LENGTH if position == length - 1 else FinishReason.STOP
        logprobs = None if params.logprobs is None else [self._position(token, params.logprobs)]
        text = "" if token == EOS_ID else bytes([token]).decode("latin-1")
        return CompletionDelta(index, text, [token], logprobs, reason, num_output_tokens=position + 1)

    def _position(self, token: int, num_top: int) -> PositionLogprobs:
        top = [TokenLogprob((token + i) % 256, self.logprob - i, i + 1) for i in range(num_top)]
        return PositionLogprobs(TokenLogprob(token, self.logprob, 1), top)

    async def drain(self, timeout_s: float) -> bool:
        return not self.running

    async def shutdown(self) -> None:
        self.fault = "it was shut down"
