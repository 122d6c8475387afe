"""Every block format against the `gguf` package, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from inferplane.models.errors import ModelLoadError
from inferplane.quantization.ggml import FORMATS, block_format
from inferplane.quantization.gguf import GgufFormat

BY_NAME = {known.name: known for known in FORMATS.values()}
PACKED = [name for name, known in BY_NAME.items() if known.is_packed]


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)


def reference(rows: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.dequantize(rows, gguf.GGMLQuantizationType[name])


def test_the_formats_that_the_project_promises_are_there() -> None:
    promised = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
    promised += ["Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS"]
    assert sorted(BY_NAME) == sorted(promised)


@pytest.mark.parametrize("name", BY_NAME)
def test_sizes_are_those_of_the_format(name: str) -> None:
    known = BY_NAME[name]
    assert known.type_id == gguf.GGMLQuantizationType[name]
    assert (known.block_size, known.bytes_per_block) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


def dequantize(rows: np.ndarray, name: str, values: int) -> np.ndarray:
    """As the core reads it: ``rows: [n, row_bytes]``."""
    matrix = GgufFormat({"tensor_types": {"m": name}}).matrix("m", len(rows), values)
    assert matrix is not None
    return matrix.read({"weight": torch.from_numpy(rows)}).dequantize(torch.float32).numpy()


@pytest.mark.parametrize("name", PACKED)
def test_random_bytes_mean_what_they_mean_to_ggml(name: str) -> None:
    known = BY_NAME[name]
    # random bytes reach infinite and not-a-number scales too
    rows = np.random.default_rng(7).integers(0, 256, (50, 40 * known.bytes_per_block), dtype=np.uint8)
    got, want = dequantize(rows, name, 40 * known.block_size), reference(rows, name)
    assert got.shape == want.shape
    # not a number is as good as another that is not
    is_number = ~np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), ~is_number)
    np.testing.assert_array_equal(bits(got[is_number]), bits(want[is_number]))


@pytest.mark.parametrize(
    "name", [name for name in PACKED if not name.endswith("_K") and not name.startswith("IQ")]
)
def test_quantized_weights_come_back_near(name: str) -> None:
    weights = np.random.default_rng(1).standard_normal((8, 256), dtype=np.float32)
    rows = gguf.quantize(weights, gguf.GGMLQuantizationType[name])
    got = dequantize(rows, name, 256)
    np.testing.assert_array_equal(bits(got), bits(reference(rows, name)))
    assert np.abs(got - weights).max() < 0.5


def test_a_configuration_that_names_no_format_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor_types: m is of 'Q9', which is none of Q4_0"):
        GgufFormat({"tensor_types": {"m": "Q9"}})
    with pytest.raises(ValueError, match="tensor_types should be a table of types by matrix, but is None"):
        GgufFormat({})


def test_a_row_is_whole_blocks() -> None:
    assert BY_NAME["Q6_K"].row_bytes(512) == 420
    with pytest.raises(ValueError, match="row of 300 values is no whole number of Q6_K blocks of 256"):
        BY_NAME["Q6_K"].row_bytes(300)


@pytest.mark.parametrize(("type_id", "name"), [(16, "IQ2_XXS"), (39, "MXFP4"), (999, "unknown")])
def test_other_types_are_refused_by_name(type_id: int, name: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"'blk\.0\.x' is of type {name} \({type_id}\).*Q4_K"):
        block_format(type_id, "blk.0.x")
