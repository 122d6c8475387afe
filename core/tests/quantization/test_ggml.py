"""Every block format against the `gguf` package, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch

from inferplane.api.quant import QuantizedWeight
from inferplane.layers.parallel import Share
from inferplane.layers.stored import StoredMatrices
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


def test_what_the_package_dequantizes_is_read() -> None:
    assert {"F32", "F16", *(kind.name for kind in gguf.quants._type_traits)} == set(BY_NAME)


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


def random_blocks(name: str, num_rows: int, num_blocks: int) -> np.ndarray:
    """Of any bytes, so that there are infinite and not-a-number scales too."""
    known = BY_NAME[name]
    shape = (num_rows, num_blocks, known.bytes_per_block)
    blocks = np.random.default_rng(7).integers(0, 256, shape, dtype=np.uint8)
    if name == "MXFP4":
        blocks[..., 0] %= 255  # the exponent that is not a number, which ggml takes for 2 ** 127
    if name == "NVFP4":
        blocks[..., :4] &= 127  # scales have no sign
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("name", PACKED)
def test_random_bytes_mean_what_they_mean_to_ggml(name: str) -> None:
    rows = random_blocks(name, 50, 40)
    got, want = dequantize(rows, name, 40 * BY_NAME[name].block_size), reference(rows, name)
    if name in ("MXFP4", "NVFP4"):
        # their table has a negative zero, which ggml's has not
        got, want = got + 0.0, want + 0.0
    assert got.shape == want.shape
    # not a number is as good as another that is not
    is_number = ~np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), ~is_number)
    np.testing.assert_array_equal(bits(got[is_number]), bits(want[is_number]))


def joined(types: dict[str, str], rows: dict[str, np.ndarray], device: str) -> list[QuantizedWeight]:
    """Matrices of one product, of 16 rows of 256 values each."""
    form, context = GgufFormat({"tensor_types": types}), SimpleNamespace(device=torch.device(device))
    matrices = {name: matrix for name in types if (matrix := form.matrix(name, 16, 256))}
    whole = dict.fromkeys(types, Share(16, 0, 16))
    stored = StoredMatrices(cast(Any, context), matrices, whole, Share(256, 0, 256))
    for slot in stored.slots(is_transposed=False):
        slot.copy(torch.from_numpy(rows[slot.name.partition(".")[0]]))
    return stored.join()


def test_types_whose_schemes_are_equal_and_tables_are_not_make_no_joint_weight() -> None:
    types = {"q": "IQ3_XXS", "k": "IQ3_XXS", "v": "IQ3_S"}
    rows = {name: random_blocks(types[name], 16, 1) for name in types}
    weights = joined(types, rows, "cpu")
    assert [weight.out_features for weight in weights] == [32, 16]
    got = torch.cat([weight.dequantize(torch.float32) for weight in weights]).numpy()
    want = np.concatenate([dequantize(rows[name], types[name], 256) for name in types])
    np.testing.assert_array_equal(got, want)
    assert sum(weight.out_features for weight in joined(types, rows, "meta")) == 48


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
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


@pytest.mark.parametrize(("type_id", "name"), [(9, "Q8_1"), (28, "F64"), (999, "unknown")])
def test_other_types_are_refused_by_name(type_id: int, name: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"'blk\.0\.x' is of type {name} \({type_id}\).*Q4_K"):
        block_format(type_id, "blk.0.x")
