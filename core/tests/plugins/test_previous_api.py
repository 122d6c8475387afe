"""Plugins of the previous API major are served through an adapter, and hooks that will go are announced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pluggy
import pytest
import torch

import elder_plugin
from inferplane import LLM, SamplingParams
from inferplane.api import DeviceDescriptor, hookspecs
from inferplane.api.attention import AttentionLayer, AttentionQuery
from inferplane.api.comm import ProcessGroup
from inferplane.api.kv import FullAttentionSpec, SlidingWindowSpec
from inferplane.api.worker import Worker, WorkerContext
from inferplane.config import ConfigError
from inferplane.plugins import PluginError, PluginRecord, discovery, load_plugins
from inferplane.plugins.previous_api import adapt_worker
from toy_plugins import ToyIndex

PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8] * n} for n in (1, 3, 12)]


def install_elder(toys: ToyIndex, **changes: str) -> None:
    source = Path(elder_plugin.__file__).read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in source
        source = source.replace(old, new)
    toys.install("elder", source)


def record(name: str) -> PluginRecord:
    return next(each for each in load_plugins(quiet=True).records if each.name == name)


def generate(folder: Path, device: str) -> list[list[int]]:
    settings = {"kv_cache_bytes": 4 << 20, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    with LLM(str(folder), device=device, **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
        return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_a_platform_of_the_previous_major_serves(toys: ToyIndex, tiny_model: Callable[[str], Path]) -> None:
    """Its own attention, product and op, in chunks and batches; the tokens are the reference's."""
    install_elder(toys)
    folder = tiny_model("llama")
    assert generate(folder, "elder") == generate(folder, "reference")
    elder = record("elder")
    assert elder.is_adapted and elder.api == "1.0"
    assert elder.notes == ("written for plugin API 1.0, which the next major ends; this inferplane has 2.0",)


def test_a_worker_that_answers_at_once(toys: ToyIndex, tiny_model: Callable[[str], Path]) -> None:
    """As a worker of API 1 did; and it is not asked for what API 1 did not have."""
    install_elder(
        toys,
        **{
            "        return ModelWorker\n": "        class ElderWorker(ModelWorker):\n"
            "            def sample(self): return super().sample().result()\n"
            "        return ElderWorker\n"
        },
    )
    folder = tiny_model("llama")
    assert generate(folder, "elder") == generate(folder, "reference")
    with pytest.raises(ConfigError, match="async_scheduling needs plugin API 2; platform 'elder'"):
        LLM(str(folder), device="elder", async_scheduling=True, kv_cache_bytes=4 << 20)


def test_a_worker_that_is_told_tokens_runs_on_one_rank() -> None:
    class ElderWorker(Worker):
        def accept(self, sampled_token_ids: object) -> None: ...  # type: ignore[override]

    def context(world_size: int) -> WorkerContext:
        config = SimpleNamespace(scheduler=SimpleNamespace(async_scheduling=False))
        device = DeviceDescriptor("elder", 0, "x", 1)
        return WorkerContext(config, None, device, None, ProcessGroup(0, world_size, ""))  # type: ignore[arg-type]

    adapted = adapt_worker(ElderWorker)
    adapted.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    adapted(context(1))
    with pytest.raises(
        ConfigError, match="tensor_parallel_size 2 needs plugin API 2: the worker of platform 'elder'"
    ):
        adapted(context(2))


def query(**changes: object) -> AttentionQuery:
    shape = {"block_size": 8, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}
    window = changes.pop("window", None)
    spec = FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(window=window, **shape)  # type: ignore[arg-type]
    layer = {"name": "l0", "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "scale": 0.25, "spec": spec}
    asked = {
        "dtype": torch.float32,
        "kv_dtype": torch.float32,
        "device": DeviceDescriptor("elder", 0, "x", 1),
    }
    layer |= {key: value for key, value in changes.items() if key not in asked}
    asked |= {key: value for key, value in changes.items() if key in asked}
    return AttentionQuery(layer=AttentionLayer(**layer), **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}, "float32 only, not bfloat16"),
        ({"window": 4}, "full attention only, not SlidingWindowSpec"),
        ({"soft_cap": 30.0}, "was written for plugin API 1, which has no soft cap"),
        ({"has_sinks": True}, "was written for plugin API 1, which has no attention sinks"),
        (
            {"kv_dtype": torch.bfloat16},
            "was written for plugin API 1, which has no KV cache of another dtype",
        ),
    ],
)
def test_what_it_cannot_know_it_is_not_asked(
    toys: ToyIndex, changes: dict[str, object], reason: str | None
) -> None:
    install_elder(toys)
    plugins = load_plugins()
    candidates = plugins.attention_decision(query(**changes)).candidates
    assert next(each for each in candidates if each.name == "elder").reason == reason


def test_a_plugin_that_declares_the_wrong_major_is_told(toys: ToyIndex) -> None:
    install_elder(
        toys, **{"def unsupported_reason(cls, layer, dtype):": "def unsupported_reason(cls, query):"}
    )
    plugins = load_plugins(quiet=True)
    with pytest.raises(
        PluginError, match=r"takes an AttentionQuery, which is of plugin API 2.*declare api=\(2, 0\)"
    ):
        plugins.attention_decision(query())


def test_a_hook_that_will_go_is_announced_by_those_who_use_it(
    toys: ToyIndex, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    class OldHooks:
        @hookspecs.hookspec(warn_on_impl=DeprecationWarning("hook old_models goes with API 3; use models"))
        def old_models(self) -> None: ...

    def manager_with_old_hooks() -> pluggy.PluginManager:
        manager = pluggy.PluginManager(hookspecs.PROJECT)
        manager.add_hookspecs(hookspecs)
        manager.add_hookspecs(OldHooks)
        return manager

    monkeypatch.setattr(discovery, "new_manager", manager_with_old_hooks)
    head = "from inferplane.api import *\nMANIFEST = PluginManifest('aged', API_VERSION, ())\n"
    toys.install("aged", head + "@hookimpl\ndef old_models(): return {}\n")
    monkeypatch.setattr("inferplane.plugins.plugin_set.new_manager", manager_with_old_hooks)
    assert record("aged").notes == ("hook old_models goes with API 3; use models",)
    assert record("reference").notes == ()
    assert not recwarn.list
