"""The CUDA platform's defaults and checks, and its runtime where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from inferplane.api import CapabilitySet, DeviceDescriptor, Supported
from inferplane.api.config import ConfigError, EngineArgs, EngineConfig
from inferplane.config import DeviceConfig, ModelConfig, ParallelConfig
from inferplane_cuda import platform as platform_module
from inferplane_cuda.platform import CudaPlatform
from inferplane_cuda.runtime import CudaRuntime


def device(*capabilities: str, index: int = 0) -> DeviceDescriptor:
    return DeviceDescriptor("cuda", index, "a GPU", 80 << 30, CapabilitySet(capabilities))


def config(dtype: str = "float16", world_size: int = 1) -> EngineConfig:
    return EngineConfig(
        ModelConfig("m", "/m", {}, "A", dtype, 128, 100),
        DeviceConfig("cuda"),
        parallel=ParallelConfig(tensor_parallel_size=world_size),
    )


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


def test_bfloat16_needs_its_product() -> None:
    with pytest.raises(ConfigError, match="does not multiply bfloat16") as caught:
        CudaPlatform().validate_config(config("bfloat16"), device("fp16_matmul"))
    assert caught.value.option == "dtype"


def test_every_rank_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Supported("cuda", 100, (device(index=0), device(index=1)))
    monkeypatch.setattr(platform_module, "probe", lambda: two)
    CudaPlatform().validate_config(config(world_size=2), device(index=0))
    with pytest.raises(ConfigError, match="from cuda:1 on, and this process sees 1") as caught:
        CudaPlatform().validate_config(config(world_size=2), device(index=1))
    assert caught.value.option == "tensor_parallel_size"


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
