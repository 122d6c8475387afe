"""The whole platform but the GPU: its kernels interpreted, its choices as on a GPU, its graphs called again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inferplane import LLM, SamplingParams
from inferplane.api import CapabilitySet, DeviceDescriptor, DeviceRuntime, GraphBackend, MemoryInfo, Supported
from inferplane.api.device import CallAgain
from inferplane.api.host_memory import host_memory
from inferplane_cuda import plugin
from inferplane_cuda.platform import CudaPlatform

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted"),
]

DEVICE = DeviceDescriptor("cuda", 0, "a GPU", 1 << 30, CapabilitySet(("bf16_matmul", "graph_capture")))


class HostRuntime(DeviceRuntime):
    def __init__(self, descriptor: DeviceDescriptor) -> None:
        self.descriptor = descriptor
        self.torch_device = torch.device("cpu")

    def set_up(self, config: Any, rank: int) -> None:
        return

    def memory(self) -> MemoryInfo:
        return host_memory()

    def graphs(self) -> GraphBackend:
        return CallAgain()


@pytest.fixture
def gpu_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "probe", lambda: Supported("cuda", 100, (DEVICE,)))
    monkeypatch.setattr(CudaPlatform, "device_runtime", lambda self, device: HostRuntime(device))


def complete(folder: Path, **args: Any) -> list[list[int]]:
    prompts = [[5, 9, 2, 40, 11, 3], [7], [3, 3, 8, 100, 20]]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with LLM(str(folder), dtype="float32", kv_cache_bytes=8 << 20, max_model_len=64, **args) as llm:
        alone = llm.generate(prompts[:1], params, use_tqdm=False)
        together = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in (*alone, *together)]


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_its_tokens_are_the_reference_platforms(
    arch: str, gpu_platform: None, tiny_model: Callable[[str], Path]
) -> None:
    folder = tiny_model(arch)
    found = complete(folder, device="cuda", max_num_seqs=4, graph_batch_sizes="1,4")
    assert found == complete(folder, device="reference")
