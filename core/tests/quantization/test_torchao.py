"""The format of torchao: which configuration a layer has, and what is refused. Its numbers are in test_formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from inferplane.quantization.torchao import TorchAoFormat
from quantized_checkpoints import torchao, torchao_int, torchao_name


def test_configurations_by_name() -> None:
    four, eight = (
        torchao(kind)["quant_type"]["default"] for kind in ("Int4WeightOnlyConfig", "Int8WeightOnlyConfig")
    )
    by_name = {"model.up": eight, "re:.*gate": None, "re:model\\.do.n": eight, "_default": four}
    config = torchao("FqnToConfig", fqn_to_config=by_name)
    found = TorchAoFormat(config)

    def bits(name: str) -> int | None:
        matrix = found.matrix(name, 128, 128)
        if matrix is None:
            return None
        return 4 if matrix.tensors()[0].shape == (128, 64) else 8

    names = ("model.up", "model.gate", "model.down", "model.upper", "model.gate_up")
    assert [bits(name) for name in names] == [8, None, 8, 4, 4]


def test_zero_points_of_what_is_symmetric() -> None:
    case = torchao_int("Int8WeightOnlyConfig", 8)
    tensors, _ = case.write(np.random.default_rng(1), 64, 96)
    tensors["._weight_zero_point"][3] = 1
    matrix = TorchAoFormat(case.config).matrix("layer", 64, 96)
    assert matrix is not None
    with pytest.raises(ValueError, match="symmetric, but there are zero points other than 0"):
        matrix.read({suffix.removeprefix("."): tensor for suffix, tensor in tensors.items()})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "torchao", "quant_type": "int4_weight_only"},
            "quant_type should be a table with a default",
        ),
        (torchao("UIntXWeightOnlyConfig"), "UIntXWeightOnlyConfig is not read; Int4WeightOnly"),
        (
            torchao("Int4WeightOnlyConfig", int4_packing_format=torchao_name("X", "TILE_PACKED_TO_4D")),
            "int4_packing_format TILE_PACKED_TO_4D is for one device; PLAIN is read",
        ),
        (
            torchao("Int4WeightOnlyConfig", group_size=48),
            "in_features 64 are no whole number of groups of 48",
        ),
        (
            torchao("Int8WeightOnlyConfig", granularity=torchao_name("PerToken", "")),
            "granularity should be a table with _type and _data",
        ),
        (
            {**torchao("Int4WeightOnlyConfig"), "include_input_output_embeddings": True},
            "only linear layers are read quantized",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_means_nothing_is_refused(config: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchAoFormat(config).matrix("layer", 64, 64)
