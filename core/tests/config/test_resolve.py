"""`resolve`: every open setting is filled, and what cannot be honoured is refused by its name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from inferplane.config import ConfigError, EngineArgs, EngineConfig
from inferplane.config.resolve import resolve
from inferplane.engine.async_engine import AsyncEngine
from inferplane.engine.llm import LLM
from inferplane.models.errors import ModelLoadError
from inferplane.plugins import load_plugins
from inferplane.reference.platform import ReferencePlatform

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 100,
    "dtype": "bfloat16",
}


@pytest.fixture
def resolved(tmp_path: Path):
    def make(
        written: Mapping[str, Any] = MODEL, /, serves_streams: bool = True, **settings: Any
    ) -> EngineConfig:
        (tmp_path / "config.json").write_text(json.dumps(written))
        header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        data = len(header).to_bytes(8, "little") + header + bytes(4)
        (tmp_path / "model.safetensors").write_bytes(data)
        args = EngineArgs(**{"model": str(tmp_path), "device": "reference", **settings})
        return resolve(args, load_plugins(quiet=True), progress=False, serves_streams=serves_streams)

    return make


def test_what_is_left_open_comes_from_the_platform_and_the_model(resolved) -> None:
    config = resolved()
    assert (config.model.dtype, config.model.max_model_len, config.model.vocab_size) == ("float32", 512, 100)
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (64, 1024)
    assert not config.model.is_max_model_len_explicit


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({}, "'reference' gave no default for dtype"),
        ({"dtype": "fp32"}, "'reference' gave a wrong default: dtype must be one of .*'fp32'"),
        (
            {"dtype": "float32", "block_size": "16"},
            "'reference' gave a wrong default: block_size must be a whole",
        ),
        (
            {"dtype": "float32", "max_num_seqs": 0},
            "'reference' gave a wrong default: max_num_seqs must be at least 1",
        ),
        ({"dtype": "float32", "blocksize": 16}, "'reference' gave defaults for unknown settings: blocksize"),
    ],
)
def test_a_platform_s_defaults_are_checked_as_the_user_s(
    resolved, monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(ReferencePlatform, "config_defaults", lambda *args: defaults)
    with pytest.raises(ConfigError, match=message) as caught:
        resolved()
    assert caught.value.option == "device"


def test_what_the_user_sets_stays(resolved) -> None:
    config = resolved(dtype="float16", max_model_len=77, block_size=8, seed=-5, max_num_seqs=3)
    assert (config.model.dtype, config.model.max_model_len) == ("float16", 77)
    assert (config.cache.block_size, config.seed, config.scheduler.max_num_seqs) == (8, -5, 3)
    assert config.model.is_max_model_len_explicit


@pytest.fixture
def limits_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform that has a default for streams' sake."""
    plain = ReferencePlatform.config_defaults

    def with_limit(self: ReferencePlatform, *context: Any) -> Mapping[str, Any]:
        return {**plain(self, *context), "max_num_mixed_prompt_tokens": 48}

    monkeypatch.setattr(ReferencePlatform, "config_defaults", with_limit)


@pytest.mark.parametrize(
    ("serves_streams", "asked", "limit"), [(True, None, 48), (False, None, None), (True, 7, 7), (False, 7, 7)]
)
def test_a_default_for_streams_is_left_out_where_none_are_served(
    resolved, limits_streams: None, serves_streams: bool, asked: int | None, limit: int | None
) -> None:
    config = resolved(serves_streams=serves_streams, max_num_mixed_prompt_tokens=asked)
    assert config.scheduler.max_num_mixed_prompt_tokens == limit
    assert config.scheduler.max_num_batched_tokens == resolved().scheduler.max_num_batched_tokens


@pytest.mark.parametrize(("asked", "limit"), [(None, None), (7, 7)])
def test_batches_offline_have_no_limit_for_the_sake_of_streams(
    tmp_path: Path, limits_streams: None, asked: int | None, limit: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_mixed_prompt_tokens": asked}
    with LLM(str(tmp_path), device="reference", **settings) as llm:
        assert llm.config.scheduler.max_num_mixed_prompt_tokens == limit


@pytest.mark.parametrize(("asked", "limit"), [(None, 48), (7, 7)])
async def test_an_engine_for_streams_has_its_platforms_limit(
    tmp_path: Path, limits_streams: None, asked: int | None, limit: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_mixed_prompt_tokens": asked}
    engine = AsyncEngine.launch(EngineArgs(model=str(tmp_path), device="reference", **settings))
    try:
        assert engine.config.scheduler.max_num_mixed_prompt_tokens == limit
    finally:
        await engine.shutdown()


@pytest.mark.parametrize(
    ("asked", "num_seqs", "budget"),
    [
        ({"max_num_batched_tokens": 32}, 32, 32),
        ({"max_num_seqs": 2000}, 2000, 2000),
        ({"max_num_seqs": 16, "max_num_batched_tokens": 32}, 16, 32),
        ({"max_num_batched_tokens": 65}, 64, 65),
    ],
)
def test_of_two_settings_that_must_fit_the_open_one_follows(
    resolved, asked: dict[str, int], num_seqs: int, budget: int
) -> None:
    scheduler = resolved(**asked).scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (num_seqs, budget)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_model_len", 0),
        ("max_model_len", 513),
        ("max_model_len", 1.5),
        ("block_size", True),
        ("kv_cache_bytes", "4GiB"),
        ("max_num_seqs", -1),
        ("max_num_seqs", 99_999_999_999),
        ("max_num_batched_tokens", 10**12),
        ("num_threads", 100_000),
        ("block_size", 1_000_000),
        ("max_num_waiting", 0),
        ("max_num_mixed_prompt_tokens", 0),
        ("dtype", "int8"),
        ("load_format", "pickle"),
        ("executor", "ray"),
        ("generation_config", "maybe"),
        ("scheduler_policy", "unfair"),
        ("seed", "lucky"),
        ("seed", 2**63),
        ("enable_prefix_caching", 1),
        ("tensor_parallel_size", 3),
        ("model", 5),
        ("health_timeout_s", 0),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused_by_name(resolved, name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(**{name: value})
    assert caught.value.option == name
    assert str(value) in str(caught.value)


def test_settings_that_exclude_each_other(resolved) -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(8\) is below max_num_seqs \(9\)"):
        resolved(max_num_seqs=9, max_num_batched_tokens=8)
    with pytest.raises(ConfigError, match="float16 is for float32 activations, but dtype is bfloat16"):
        resolved(dtype="bfloat16", kv_cache_dtype="float16")
    with pytest.raises(
        ConfigError, match="--quantization is dequantize, but the checkpoint is plain already"
    ):
        resolved(quantization="dequantize")
    with pytest.raises(ConfigError, match="executor local runs one rank"):
        resolved(executor="local", tensor_parallel_size=2)


def test_every_rank_needs_a_device_unless_they_share_it(resolved, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved(tensor_parallel_size=2).parallel.world_size == 2
    monkeypatch.setattr(ReferencePlatform, "ranks_share_device", False)
    assert resolved().parallel.world_size == 1
    with pytest.raises(
        ConfigError, match="size 2 needs as many devices from reference:0 on, and this process sees 1"
    ) as caught:
        resolved(tensor_parallel_size=2)
    assert caught.value.option == "tensor_parallel_size"


@pytest.mark.parametrize("vocab_size", [None, 0, "100", 1.5])
def test_a_model_without_a_vocabulary_is_refused(resolved, vocab_size: object) -> None:
    with pytest.raises(ModelLoadError, match="vocab_size"):
        resolved({**MODEL, "vocab_size": vocab_size})
    with pytest.raises(ModelLoadError, match="vocab_size"):
        resolved({key: value for key, value in MODEL.items() if key != "vocab_size"})


def test_resolving_imports_no_torch(resolved, tmp_path: Path) -> None:
    resolved()
    code = (
        "import sys\n"
        "from inferplane.config import EngineArgs\n"
        "from inferplane.config.resolve import resolve\n"
        "from inferplane.plugins import load_plugins\n"
        f"resolve(EngineArgs(model={str(tmp_path)!r}, device='reference'), load_plugins())\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
