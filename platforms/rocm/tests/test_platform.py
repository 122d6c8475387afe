"""The platform's choices, and what it offers for a device that nobody has here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inferplane.api.config import EngineArgs
from inferplane.api.linear import LinearShape
from inferplane.api.quant import Granularity, Number, QuantScheme
from inferplane.api.quantized_weight import Activation
from inferplane_kernels_triton.decode_attention import DecodeConfig
from inferplane_rocm import launch, plugin
from inferplane_rocm.launch import LAUNCH
from inferplane_rocm.linear import RocmFp8BlockLinear, RocmFp8Linear
from inferplane_rocm.platform import RocmPlatform
from inferplane_rocm.probing import describe
from inferplane_rocm.runtime import RocmRuntime
from inferplane_rocm.topology import Gpu

MI300 = describe(Gpu("", "gfx942", 304, 64, 192 << 30), 0)
RADEON = describe(Gpu("", "gfx1100", 96, 32, 24 << 30), 1)


def test_it_is_torchs_cuda_with_hip_behind_it() -> None:
    runtime = RocmPlatform().device_runtime(RADEON)
    assert isinstance(runtime, RocmRuntime)
    assert runtime.torch_device == torch.device("cuda", 1)
    assert RocmPlatform.collectives == "nccl"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_checkpoints_dtype_stays(dtype: str) -> None:
    assert RocmPlatform().config_defaults(EngineArgs(), MI300, dtype)["dtype"] == dtype


def test_what_it_offers() -> None:
    assert [each.name for each in plugin.attention_backends()] == [
        "rocm_aiter",
        "rocm_triton",
        "rocm_torch",
    ]
    assert [each.name for each in plugin.linear_kernels()] == ["rocm_dense"]
    assert [each.name for each in plugin.quantized_linear_kernels()] == [
        "rocm_fp8",
        "rocm_fp8_block",
        "rocm_int4",
        "rocm_int8",
    ]
    assert {each.op for each in plugin.op_implementations()} >= {"rms_norm", "rotary"}


def test_kernels_are_launched_as_the_architectures_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two warps of 64 lanes where the portable default has four of 32."""
    monkeypatch.setattr(launch, "architecture_of", lambda device: "gfx942")
    like = torch.empty(1, dtype=torch.bfloat16, device="meta")
    tuned = launch.Launch(
        "amd", tuning_file=lambda device: launch.tuning_file(launch.architecture_of(device))
    )
    default = DecodeConfig.default(like.dtype)
    assert tuned.config("decode_attention", (8, 1024), default, like).num_warps == 2
    wide = torch.empty(1, dtype=torch.float32, device="meta")
    assert tuned.config("decode_attention", (8, 1024), default, wide) == default
    assert not LAUNCH.pdl(torch.device("cuda", 0))
    assert LAUNCH.config("decode_attention", (8, 1024), default, torch.empty(1)) == default


def test_doctor_says_what_is_missing() -> None:
    found = {each.check: each for each in plugin.diagnose()}
    assert list(found) == ["driver", "torch build", "triton", "AITER"]
    if "rocm" not in torch.__version__:
        assert "without ROCm" in found["torch build"].found
        assert found["torch build"].mend


@pytest.mark.parametrize(
    ("architecture", "reason"), [("gfx942", "the device has no fp8_e4m3_matmul"), ("gfx950", None)]
)
def test_fp8_weights_are_for_gpus_with_their_format(architecture: str, reason: str | None) -> None:
    scheme = QuantScheme(
        Number.FP8_E4M3, 8, Granularity(1, None), torch.float32,
        activation=Activation.DYNAMIC_TOKEN, activation_number=Number.FP8_E4M3,
    )  # fmt: skip
    shape = LinearShape("w", 128, 256, torch.bfloat16, False, scheme)
    device = describe(Gpu("", architecture, 256, 64, 1 << 30), 0)
    assert RocmFp8Linear.unsupported_reason(shape, device) == reason
    block = replace(shape, scheme=replace(scheme, granularity=Granularity(128, 128)))
    assert RocmFp8BlockLinear.unsupported_reason(block, device) == reason
