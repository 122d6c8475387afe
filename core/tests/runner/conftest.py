"""Fixtures for the runner's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inferplane.api import DeviceDescriptor, DeviceRuntime
from inferplane.plan import NewRequest
from inferplane.request import SamplingParams


@pytest.fixture(scope="session")
def runtime() -> DeviceRuntime:
    from inferplane.reference.platform import HostRuntime

    return HostRuntime(DeviceDescriptor("reference", index=0, name="host", total_memory_bytes=1 << 30))


@pytest.fixture
def new_request() -> Callable[..., NewRequest]:
    """`new_request("a", [1, 2, 3], temperature=0.5)`: a request with those sampling parameters."""

    def make(
        request_id: str,
        token_ids: list[int],
        *,
        num_prompt_tokens: int | None = None,
        num_computed_tokens: int = 0,
        block_ids: list[list[int]] | None = None,
        seed: int = 0,
        max_tokens: int = 1000,
        eos_token_ids: list[int] | None = None,
        bad_words_token_ids: list[list[int]] | None = None,
        **params: object,
    ) -> NewRequest:
        return NewRequest(
            request_id=request_id,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
            num_computed_tokens=num_computed_tokens,
            block_ids=block_ids or [[]],
            params=SamplingParams(max_tokens=None, **params),  # type: ignore[arg-type]
            seed=seed,
            max_tokens=max_tokens,
            eos_token_ids=eos_token_ids or [],
            bad_words_token_ids=bad_words_token_ids or [],
        )

    return make
