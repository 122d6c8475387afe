"""`AsyncEngine.launch`: a real model in the engine process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from inferplane import LLM, RequestOutput, SamplingParams
from inferplane.config import ConfigError, EngineArgs
from inferplane.engine.async_engine import AsyncEngine
from inferplane.models.errors import ModelLoadError


def args_for(folder: Path, **more: object) -> EngineArgs:
    settings = {
        "device": "reference",
        "dtype": "float32",
        "kv_cache_bytes": 8 << 20,
        "max_num_seqs": 8,
        **more,
    }
    return EngineArgs(model=str(folder), **settings)  # type: ignore[arg-type]


async def complete(
    engine: AsyncEngine, prompt: str, params: SamplingParams, request_id: str
) -> RequestOutput:
    whole = RequestOutput.begin(request_id, prompt, [], params.n)
    async for delta in engine.generate(prompt, params, request_id=request_id):
        whole.grow(delta)
    return whole


async def test_it_says_what_the_offline_engine_says(tiny_model: Callable[[str], Path]) -> None:
    args = args_for(tiny_model("llama"))
    prompts = [f"The Licensor grants {i}" for i in range(12)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, n=2)
    engine = AsyncEngine.launch(args)
    try:
        assert not engine.is_ready
        assert engine.tokenizer.encode("a") == await engine.encode_prompt("a")
        await engine.wait_ready()
        results = await asyncio.gather(*(complete(engine, p, params, p) for p in prompts))
    finally:
        await engine.shutdown()
    with LLM(engine_args=args) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    for result, output in zip(results, expected, strict=True):
        assert [c.token_ids for c in result.outputs] == [c.token_ids for c in output.outputs]
        assert [c.text for c in result.outputs] == [c.text for c in output.outputs]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"model": "/no/such/folder"}, ModelLoadError, "/no/such/folder"),
        ({"dtype": "float8"}, ConfigError, "float8"),
    ],
)
def test_what_is_wrong_at_once_is_said_at_once(
    tiny_model: Callable[[str], Path], settings: dict[str, str], error: type[Exception], message: str
) -> None:
    folder = Path(settings.pop("model", tiny_model("llama")))
    with pytest.raises(error, match=message):
        AsyncEngine.launch(args_for(folder, **settings))
    engines = [c for c in psutil.Process().children() if "inferplane.engine.process" in " ".join(c.cmdline())]
    assert engines == []


async def test_what_only_the_engine_can_see_reaches_the_caller(tiny_model: Callable[[str], Path]) -> None:
    engine = AsyncEngine.launch(args_for(tiny_model("llama"), kv_cache_bytes=4096 * 16, max_model_len=1000))
    with pytest.raises(
        ConfigError, match=r"needs .* MiB .* the largest max_model_len that fits is"
    ) as caught:
        await engine.wait_ready()
    assert caught.value.option == "max_model_len"
    await engine.shutdown()


FRONT_END_ONLY = """
import asyncio, sys
from inferplane.config import EngineArgs
from inferplane.engine.async_engine import AsyncEngine

async def main():
    args = EngineArgs(model={folder!r}, device="reference", dtype="float32", kv_cache_bytes=8 << 20)
    engine = AsyncEngine.launch(args)
    await engine.wait_ready()
    from inferplane import SamplingParams
    async for _ in engine.generate("hello", SamplingParams(max_tokens=2), request_id="r"):
        pass
    await engine.shutdown()
    print([name for name in ("torch", "transformers") if name in sys.modules])

asyncio.run(main())
"""


def test_the_front_end_never_imports_torch(tiny_model: Callable[[str], Path]) -> None:
    code = FRONT_END_ONLY.format(folder=str(tiny_model("llama")))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
