"""The CUDA platform's defaults and checks, and its runtime where there is a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inferplane.api import CapabilitySet, DeviceDescriptor
from inferplane.api.config import ConfigError, EngineArgs, EngineConfig
from inferplane.config import DeviceConfig, ModelConfig
from inferplane_cuda.platform import CudaPlatform
from inferplane_cuda.runtime import CudaRuntime


def device(*capabilities: str, index: int = 0) -> DeviceDescriptor:
    return DeviceDescriptor("cuda", index, "a GPU", 80 << 30, CapabilitySet(capabilities))


def config(dtype: str = "float16") -> EngineConfig:
    return EngineConfig(ModelConfig("m", "/m", {}, "A", dtype, 128, 100), DeviceConfig("cuda"))


@pytest.mark.parametrize(
    ("checkpoint", "capabilities", "dtype"),
    [
        ("float32", ("fp16_matmul", "bf16_matmul"), "float32"),
        ("bfloat16", ("fp16_matmul", "bf16_matmul"), "bfloat16"),
        ("float16", ("fp16_matmul", "bf16_matmul"), "float16"),
        ("bfloat16", ("fp16_matmul",), "float16"),
    ],
)
def test_the_dtype_that_auto_means(checkpoint: str, capabilities: tuple[str, ...], dtype: str) -> None:
    defaults = CudaPlatform().config_defaults(EngineArgs(), device(*capabilities), checkpoint)
    assert defaults["dtype"] == dtype


def test_the_limit_for_streams_has_a_reason() -> None:
    defaults = CudaPlatform().config_defaults(EngineArgs(), device("bf16_matmul"), "bfloat16")
    assert defaults["max_num_mixed_prompt_tokens"] == 2048
    assert "offline" in defaults.reasons["max_num_mixed_prompt_tokens"]


@pytest.mark.parametrize(("gigabytes", "tokens"), [(24, 8192), (80, 16384), (141, 16384)])
def test_the_tokens_of_a_step_follow_the_memory(gigabytes: int, tokens: int) -> None:
    there = replace(device("bf16_matmul"), total_memory_bytes=gigabytes * 10**9)
    assert CudaPlatform().config_defaults(EngineArgs(), there, "bfloat16")["max_num_batched_tokens"] == tokens


def test_bfloat16_needs_its_product() -> None:
    with pytest.raises(ConfigError, match="does not multiply bfloat16") as caught:
        CudaPlatform().validate_config(config("bfloat16"), device("fp16_matmul"))
    assert caught.value.option == "dtype"


@pytest.mark.gpu
def test_the_runtime_moves_bytes(gpu: torch.device) -> None:
    runtime = CudaRuntime(device())
    runtime.set_up(config(), rank=0)
    before = runtime.memory()
    assert 0 < before.available_bytes <= before.total_bytes
    host = torch.randn(1000, 1000)
    there = runtime.to_device(host)
    assert there.device == torch.device("cuda", 0)
    assert torch.equal(runtime.to_host(there * 2), host * 2)
    held = torch.empty(1 << 30, dtype=torch.uint8, device=gpu)
    assert runtime.memory().available_bytes <= before.available_bytes - (1 << 30)
    del held
    assert runtime.memory().available_bytes > before.available_bytes - (1 << 29)


@pytest.fixture
def runtime(gpu: torch.device) -> CudaRuntime:
    runtime = CudaRuntime(device())
    runtime.set_up(config(), rank=0)
    return runtime


@pytest.mark.gpu
def test_a_copy_to_the_host_holds_what_was_there_when_it_was_queued(runtime: CudaRuntime) -> None:
    there = torch.arange(1 << 20, device=runtime.torch_device)
    copy = runtime.to_host_async(there)
    there.zero_()
    event = runtime.record_event()
    assert torch.equal(copy.tensor(), torch.arange(1 << 20))
    event.wait()
    assert not there.any()


@pytest.mark.gpu
def test_staged_copies(runtime: CudaRuntime) -> None:
    host = runtime.pin((3, 5), torch.int32)
    assert host.is_pinned() and not host.any()
    host.copy_(torch.arange(15).view(3, 5))
    there = torch.full((3, 5), -1, dtype=torch.int32, device=runtime.torch_device)
    runtime.copy_to_device(there, host)
    assert torch.equal(runtime.to_host(there), host)


@pytest.mark.gpu
def test_graphs_share_memory_and_read_new_contents(runtime: CudaRuntime) -> None:
    graphs = runtime.graphs()
    assert graphs is not None
    source = torch.zeros(1 << 20, device=runtime.torch_device)
    outs = [torch.empty(size, device=runtime.torch_device) for size in (1 << 20, 1 << 10)]

    def run(out: torch.Tensor) -> None:
        out.copy_((source[: len(out)] * 2 + 1).sqrt() + 1)  # with intermediates from the graphs' own memory

    captured = [graphs.capture(lambda out=out: run(out)) for out in outs]
    reserved = torch.cuda.memory_reserved()
    for value in (4.0, 12.0):
        source.fill_(value)
        for graph, out in zip(captured, outs):
            graph.replay()
            assert torch.equal(out, torch.full_like(out, (2 * value + 1) ** 0.5 + 1))
    assert torch.cuda.memory_reserved() == reserved


@pytest.mark.gpu
def test_the_peak_is_what_was_held_at_once(runtime: CudaRuntime) -> None:
    def run() -> None:
        for _ in range(3):
            torch.empty(64 << 20, dtype=torch.uint8, device=runtime.torch_device)

    assert runtime.measure_peak_bytes(run) == 64 << 20


@pytest.mark.gpu
def test_a_profile_names_the_kernels(runtime: CudaRuntime) -> None:
    x = torch.randn(512, 512, device=runtime.torch_device)
    text = runtime.profile(lambda: [x @ x for _ in range(5)] and None)
    assert text is not None and text.startswith("device busy") and "kernel" in text
