"""The op `fused_experts` with the configurations of a table, against the reference in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inferplane.api.ops import fused_experts
from inferplane_kernels_triton.moe_experts import ExpertsConfig
from inferplane_kernels_triton.moe_one_token import OneTokenConfig
from inferplane_torch_accelerator import experts
from inferplane_torch_accelerator.launch import Launch

EXPERTS, HIDDEN, INNER, TOP_K = 4, 32, 16, 2
TILE = {"tokens": 16, "rows": 16, "columns": 32, "num_warps": 4, "num_stages": 1}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the kernel was given beside its operands, call by call."""
    calls: list[dict[str, Any]] = []
    kernel = experts.fused_experts

    def spy(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(options)
        return kernel(*args, **options)

    monkeypatch.setattr(experts, "fused_experts", spy)
    return calls


@pytest.fixture
def launch_of(tmp_path: Path) -> Callable[[dict[str, Any]], Launch]:
    def make(kernels: dict[str, Any]) -> Launch:
        file = tmp_path / "table.json"
        file.write_text(json.dumps({"kernels": kernels}))
        return Launch("nvidia", tuning_file=lambda device: file)

    return make


def check(op: Callable[..., torch.Tensor], num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(num_tokens)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, TOP_K, generator=generator).to(device)
    arguments = (
        randn(num_tokens, HIDDEN), weights, ids.int().to(device),
        randn(EXPERTS, 2 * INNER, HIDDEN), randn(EXPERTS, HIDDEN, INNER),
    )  # fmt: skip
    want = fused_experts(*(each.double() if each.is_floating_point() else each for each in arguments))
    error = (op(*arguments).double() - want).norm() / want.norm()
    assert error < (1e-5 if dtype == torch.float32 else 2e-3)


def test_a_step_takes_the_nearest_measured_configuration(
    seen: list[dict[str, Any]], launch_of: Callable[[dict[str, Any]], Launch], device: torch.device
) -> None:
    shape = f"{EXPERTS}x{HIDDEN}x{INNER}"
    launch = launch_of(
        {
            "fused_experts": {f"4x{shape}": TILE, f"1000x{shape}": {**TILE, "rows": 32}},
            "fused_experts_down": {f"4x{shape}": {**TILE, "columns": 16}},
        }
    )
    op = experts.tuned_experts(launch)
    for _ in range(2):
        check(op, 6, torch.float16, device)
        assert seen[-1]["config"] == ExpertsConfig(**TILE)
        assert seen[-1]["down_config"] == ExpertsConfig(**{**TILE, "columns": 16})


def test_what_was_not_measured_is_launched_as_by_default(
    seen: list[dict[str, Any]], launch_of: Callable[[dict[str, Any]], Launch], device: torch.device
) -> None:
    op = experts.tuned_experts(launch_of({"fused_experts": {"*": TILE}}))
    check(op, 3, torch.float32, device)  # tables are for half precision
    default = ExpertsConfig.default(3 * TOP_K, EXPERTS, torch.float32)
    assert seen[-1]["config"] == seen[-1]["down_config"] == default
    check(op, 3, torch.float16, device)
    assert seen[-1]["config"] == seen[-1]["down_config"] == ExpertsConfig(**TILE)


def test_a_single_token_has_configurations_of_its_own(
    seen: list[dict[str, Any]], launch_of: Callable[[dict[str, Any]], Launch], device: torch.device
) -> None:
    op = experts.tuned_experts(
        launch_of({"one_token_experts": {f"{INNER}x{HIDDEN}": {"rows": 2, "columns": 16, "num_warps": 1}}})
    )
    check(op, 1, torch.float16, device)
    assert seen[-1]["one_token"] == (OneTokenConfig(2, 16, 1), OneTokenConfig.for_down())
