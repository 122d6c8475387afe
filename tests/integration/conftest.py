"""A real server over the demo model, shared by the tests that do not end it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from server_process import ServerProcess

API_KEY = "sk-integration-0123456789"
MODEL = "smollm2"
ENGINE_OPTIONS = (
    "--dtype",
    "float32",
    "--quantization",
    "dequantize",
    "--num-threads",
    "1",
    "--kv-cache-bytes",
    "512MiB",
    "--served-model-name",
    MODEL,
)


@pytest.fixture(scope="session")
def server(smollm2_gguf: Path) -> Iterator[ServerProcess]:
    with ServerProcess(smollm2_gguf, *ENGINE_OPTIONS, "--api-key", API_KEY) as process:
        yield process.wait_ready()


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0, timeout=120)


@pytest.fixture
async def async_client(server: ServerProcess) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0, timeout=120)
