"""quack (the package `quack-kernels`, which FlashAttention-4 brings along) as a library of products of many rows.

A kernel is compiled for each choice of tiles and of what is done to the product, for seconds, and serves every size.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from inferplane_cuda import cute_compiling, cute_packages

CAPABILITY = "warpgroup_matmul"
"""Of GPUs that its tiles here are for."""
CACHE_DIR = "QUACK_CACHE_DIR"
"""The library's environment variable: where it keeps compiled kernels."""
ALIGNED = 8
"""Numbers of a row that bulk copies of half precision move at once: sizes are multiples of it."""

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "Tiles", bool], None]
"""Of x and a transposed weight, into a tensor, by tiles; whether it goes through a gate."""

logger = logging.getLogger("inferplane.linear")


@dataclass(frozen=True)
class Tiles:
    """Of the result, and how thread blocks share them. The fields are the library's, and those of an entry of the
    tuning table, which holds whole numbers."""

    tile_m: int = 256
    tile_n: int = 192
    pingpong: int = 0
    """Whether two groups of warps take turns at whole tiles, or share one."""
    cluster_m: int = 2
    cluster_n: int = 1


def missing_package() -> str | None:
    """The first of the packages that is not installed; None when all are."""
    return cute_packages.missing_package("quack.gemm_interface", "quack-kernels")


def start_compiling(weight: torch.Tensor, tiles: Tiles, *, is_gated: bool) -> None:
    """Of the kernel that multiplies by a weight like this one, beside the thread that loads weights."""
    kernel = ("quack", weight.dtype, tiles, is_gated)

    def launch() -> None:
        _launch(weight.new_zeros(ALIGNED, weight.shape[1]), weight, tiles, is_gated)

    cute_compiling.start_compiling(kernel, launch, weight.device)


def product(x: torch.Tensor, weight: torch.Tensor, tiles: Tiles, *, is_gated: bool) -> torch.Tensor | None:
    """``x @ weight.T``, with ``is_gated`` through the op ``silu_and_mul``; None where the library cannot be imported.

    ``x: [rows, in]`` in rows that begin at multiples of 16 bytes, ``weight: [out, in]``, both of half precision.
    """
    cute_compiling.wait()
    return _launch(x, weight, tiles, is_gated)


def _launch(x: torch.Tensor, weight: torch.Tensor, tiles: Tiles, is_gated: bool) -> torch.Tensor | None:
    multiply = _imported()
    if multiply is None:
        return None
    out = x.new_empty(x.shape[0], weight.shape[0] // 2 if is_gated else weight.shape[0])
    multiply(x, weight.t(), out, tiles, is_gated)
    return out


@cache
def _imported() -> Product | None:
    _keep_on_disk()
    without = "products of many rows are left to torch's library, which is slower"
    return cute_packages.import_or_warn("quack", _import, logger, without)


def _import() -> Product:
    from quack.gemm_config import GemmConfig
    from quack.gemm_interface import gemm_act

    @cache
    def config_of(tiles: Tiles) -> Any:
        return GemmConfig(
            tile_m=tiles.tile_m,
            tile_n=tiles.tile_n,
            pingpong=bool(tiles.pingpong),
            cluster_m=tiles.cluster_m,
            cluster_n=tiles.cluster_n,
            is_dynamic_persistent=False,
            device_capacity=9,
        )

    def multiply(
        x: torch.Tensor, transposed: torch.Tensor, out: torch.Tensor, tiles: Tiles, is_gated: bool
    ) -> None:
        gemm_act(
            x,
            transposed,
            activation="swiglu" if is_gated else None,
            postact_out=out,
            store_preact=False,
            tuned=False,
            config=config_of(tiles),
            concat_layout=("B",) if is_gated else None,  # gate above up, where it expects them in turn
        )

    return multiply


def _keep_on_disk() -> None:
    """In a folder of the user's own, unless the environment says otherwise. By itself it is one below the system's
    for temporary files, that any user could make first. It is read when the library is imported."""
    if CACHE_DIR not in os.environ and (folder := cute_compiling.cache_folder("quack")) is not None:
        os.environ[CACHE_DIR] = str(folder)
