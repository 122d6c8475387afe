"""Writing a quantized checkpoint in the format of compressed-tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from inferplane.api.attention import AttentionBackend, AttentionLayer
from inferplane.api.comm import SoloCommunicator
from inferplane.api.model import BuildContext, Model
from inferplane.api.quant import QuantFormat, StoredMatrix
from inferplane.api.quantized_weight import FLOAT8, Number, QuantizedWeight, QuantScheme
from inferplane.config import EngineConfig
from inferplane.layers import walk_layers
from inferplane.models.errors import ModelLoadError
from inferplane.models.loader import load_tokenizer, open_checkpoint
from inferplane.models.registry import build_model
from inferplane.models.source import ModelSource
from inferplane.plugins import PluginSet
from inferplane.quantization.calibration import Calibration, text_batch
from inferplane.quantization.kv_calibration import KVCalibration
from inferplane.quantization.online import LEAST_FEATURES
from inferplane.quantization.rounding import (
    FP8_CHANNEL,
    INT4_GROUPS,
    INT8_CHANNEL,
    MXFP4,
    round_to,
    with_columns,
)
from inferplane.reference.attention import ReferenceAttention

SCHEMES: Mapping[str, QuantScheme] = {
    "fp8": FP8_CHANNEL,
    "int8": INT8_CHANNEL,
    "int4": INT4_GROUPS,
    "mxfp4": MXFP4,
}
"""fp8 and int8 with activations by the token, the others for weights alone; the group of int4 can be changed."""

_TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True}
_KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
_SHARD_BYTES = 4 << 30
LEAST_CALIBRATION_TOKENS = 16


@dataclass(frozen=True)
class Written:
    """What `write_quantized` made of a checkpoint."""

    num_matrices: int
    """That were rounded."""
    num_plain: int
    """Tensors that were copied."""
    bytes_before: int
    bytes_after: int


def scheme_named(name: str, group_size: int | None) -> QuantScheme:
    """One of `SCHEMES`. Raises `ModelLoadError` for a group size where the scheme has none to choose."""
    scheme = SCHEMES[name]
    if group_size is None:
        return scheme
    if name != "int4" or group_size < 2 or group_size % 2:
        raise ModelLoadError(
            f"--group-size is for --scheme int4 and an even number, but is {group_size} for {name}"
        )
    return with_columns(scheme, group_size)


def write_quantized(
    config: EngineConfig,
    plugins: PluginSet,
    scheme: QuantScheme,
    out: Path,
    *,
    calibration_text: str | None = None,
    kv_text: str | None = None,
    progress: bool = True,
) -> Written:
    """Writes the model of ``config``, a folder of plain weights, to the folder ``out``, which must not be there yet.

    Rounded are the matrices of linear layers; embeddings, the output head, routers and norms stay as they are. With
    ``calibration_text`` they are rounded with error feedback (`Calibration`), but for those of experts; that is for
    schemes with groups. With ``kv_text`` the scales of an fp8 KV cache are written, too, as that text says. Raises
    `ModelLoadError` naming the matrix that the scheme does not fit.
    """
    source = Path(config.model.path)
    if not source.is_dir() or config.model.hf_config.get("quantization_config"):
        raise ModelLoadError(f"{source}: only a folder of plain weights can be quantized")
    if out.exists():
        raise ModelLoadError(f"{out}: is there already; name a folder that is not")
    names = _matrices(config, plugins)
    calibrated: Mapping[str, QuantizedWeight] = {}
    if calibration_text is not None:
        calibrated = _calibrate(config, plugins, scheme, names, calibration_text)
    kv_scales = {} if kv_text is None else _kv_scales(config, plugins, kv_text)
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True)
    try:
        writer = _Writer(partial)
        for name, tensor in _with_bar(source, progress):
            layer = name.removesuffix(".weight")
            if layer in names and name != layer and tuple(tensor.shape) == names[layer]:
                writer.add_matrix(layer, tensor, scheme, calibrated.get(layer))
            else:
                writer.add_plain(name, tensor)
        for name, tensor in kv_scales.items():
            writer.add_plain(name, tensor)
        if not writer.rounded:
            raise ModelLoadError(f"{source}: has none of the matrices that a {config.model.architecture} has")
        writer.finish()
        _copy_others(source, partial)
        settings = _settings(scheme, writer.plain_matrices(names))
        if kv_scales:
            settings["kv_cache_scheme"] = _KV_SCHEME
        original = json.loads((source / "config.json").read_text(encoding="utf-8"))
        text = json.dumps({**original, "quantization_config": settings}, indent=2)
        (partial / "config.json").write_text(text + "\n", encoding="utf-8")
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Written(len(writer.rounded), writer.num_plain, writer.bytes_before, writer.bytes_after)


class _Asking(QuantFormat):
    """Notes every matrix that a model's layers ask about, and says that it is plain."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.found: dict[str, tuple[int, int]] = {}

    def matrix(self, name: str, out_features: int, in_features: int) -> StoredMatrix | None:
        if min(out_features, in_features) >= LEAST_FEATURES:
            self.found[name] = (out_features, in_features)
        return None


def _context(config: EngineConfig, plugins: PluginSet, device: torch.device) -> BuildContext:
    """Of a plain model on the reference attention."""
    descriptor = plugins.select_device(config.device.platform)
    dtype = getattr(torch, config.model.dtype)

    def attention(layer: AttentionLayer) -> AttentionBackend:
        return ReferenceAttention()

    return BuildContext(
        config=config,
        ops=plugins.resolve_ops(descriptor, dtype),
        comm=SoloCommunicator(),
        device=device,
        dtype=dtype,
        choose_linear=lambda shape: plugins.choose_linear(shape, descriptor),
        choose_attention=attention,
    )


def _calibrate(
    config: EngineConfig,
    plugins: PluginSet,
    scheme: QuantScheme,
    names: Mapping[str, tuple[int, int]],
    text: str,
) -> Mapping[str, QuantizedWeight]:
    if not scheme.is_packed:
        raise ModelLoadError(f"calibration is for schemes with groups, not for {scheme}")
    for name, shape in names.items():
        _check_groups(name, shape, scheme)
    token_ids = _tokens(config, text)
    calibration = Calibration(scheme, names)
    model = _loaded(config, plugins, calibration.context(_context(config, plugins, torch.device("cpu"))))
    calibration.run(model, token_ids, config.cache.block_size)
    return calibration.rounded


def _kv_scales(config: EngineConfig, plugins: PluginSet, text: str) -> dict[str, torch.Tensor]:
    token_ids = _tokens(config, text)
    calibration = KVCalibration()
    model = _loaded(config, plugins, calibration.context(_context(config, plugins, torch.device("cpu"))))
    with torch.inference_mode():
        model(text_batch(model, token_ids, config.cache.block_size))
    return calibration.tensors()


def _tokens(config: EngineConfig, text: str) -> list[int]:
    token_ids = load_tokenizer(_source(config)).encode(text)
    if len(token_ids) < LEAST_CALIBRATION_TOKENS:
        raise ModelLoadError(
            f"the calibration text has {len(token_ids)} tokens, and should have {LEAST_CALIBRATION_TOKENS} at least"
        )
    return token_ids


def _loaded(config: EngineConfig, plugins: PluginSet, context: BuildContext) -> Model:
    model = build_model(context, plugins.models())
    with torch.inference_mode():
        model.load_weights(open_checkpoint(_source(config)).tensors())
    return model


def _source(config: EngineConfig) -> ModelSource:
    return ModelSource(config.model.path, "folder", Path(config.model.path))


def _check_groups(name: str, shape: tuple[int, ...], scheme: QuantScheme) -> None:
    size = scheme.granularity.columns
    if size is not None and shape[1] % size:
        raise ModelLoadError(
            f"{name} [{shape[0]}, {shape[1]}]: its columns are no whole number of groups of {size}"
        )


def _matrices(config: EngineConfig, plugins: PluginSet) -> dict[str, tuple[int, int]]:
    """``(out_features, in_features)`` by name, from the model on the meta device."""
    asking = _Asking({})
    context = replace(_context(config, plugins, torch.device("meta")), quantization=asking)
    model = build_model(context, plugins.models())
    for layer in walk_layers(model):
        layer.weight_slots()  # experts ask when they name their tensors
    return asking.found


def _with_bar(source: Path, progress: bool) -> Iterator[tuple[str, torch.Tensor]]:
    checkpoint = open_checkpoint(ModelSource(str(source), "folder", source))
    if not progress:
        yield from checkpoint.tensors()
        return
    from tqdm import tqdm

    yield from tqdm(
        checkpoint.tensors(), total=len(checkpoint.tensor_names()), desc="Quantizing", unit=" tensors"
    )


class _Writer:
    """Tensors that wait for their file; a file is written as soon as it is full."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, torch.Tensor] = {}
        self._waiting_bytes = 0
        self._files: list[tuple[Path, list[str]]] = []
        self.rounded: list[str] = []
        self.num_plain = self.bytes_before = self.bytes_after = 0

    def add_plain(self, name: str, tensor: torch.Tensor) -> None:
        self.num_plain += 1
        self.bytes_before += tensor.nbytes
        self._add(name, tensor)

    def add_matrix(
        self, name: str, tensor: torch.Tensor, scheme: QuantScheme, rounded: QuantizedWeight | None
    ) -> None:
        _check_groups(name, tuple(tensor.shape), scheme)
        self.rounded.append(name)
        self.bytes_before += tensor.nbytes
        for suffix, part in stored_form(rounded or round_to(tensor, scheme)).items():
            self._add(f"{name}.{suffix}", part)

    def plain_matrices(self, names: Mapping[str, object]) -> list[str]:
        return sorted(names.keys() - set(self.rounded))

    def finish(self) -> None:
        """Names the files by their number, with an index where there are several."""
        self._flush()
        if len(self._files) == 1:
            self._files[0][0].rename(self._folder / "model.safetensors")
            return
        places = {}
        for number, (path, names) in enumerate(self._files, 1):
            final = f"model-{number:05}-of-{len(self._files):05}.safetensors"
            path.rename(self._folder / final)
            places.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self.bytes_after}, "weight_map": places}
        text = json.dumps(index, indent=2)
        (self._folder / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        self._waiting[name] = tensor.contiguous()
        self._waiting_bytes += tensor.nbytes
        self.bytes_after += tensor.nbytes
        if self._waiting_bytes > _SHARD_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            path = self._folder / f"part-{len(self._files)}"
            save_file(self._waiting, path, metadata={"format": "pt"})
            self._files.append((path, list(self._waiting)))
            self._waiting, self._waiting_bytes = {}, 0


def stored_form(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """The tensors of a matrix by suffix."""
    scheme = weight.scheme
    if scheme.number is Number.FP4:
        return {"weight_packed": weight.codes, "weight_scale": weight.scale.view(torch.uint8)}
    if not scheme.is_packed:
        return {"weight": weight.codes, "weight_scale": weight.scale}
    # two codes a byte, the first in the low half, are eight codes a word already
    padding = -weight.codes.shape[1] % 4
    words = torch.nn.functional.pad(weight.codes, (0, padding)).view(torch.int32)
    shape = torch.tensor([weight.out_features, weight.in_features])
    return {"weight_packed": words, "weight_scale": weight.scale, "weight_shape": shape}


def _settings(scheme: QuantScheme, plain: list[str]) -> dict[str, Any]:
    """The ``quantization_config``."""
    is_float = scheme.number is not Number.INT
    kind = "float" if is_float else "int"
    layout = f"{kind}-quantized" if not scheme.is_packed else "pack-quantized"
    if scheme.number is Number.FP4:
        layout = "mxfp4-pack-quantized"
    columns = scheme.granularity.columns
    weights = {
        "num_bits": scheme.bits,
        "type": kind,
        "symmetric": True,
        "strategy": "channel" if columns is None else "group",
        "group_size": columns,
        "dynamic": False,
    }
    by_token = scheme.number in FLOAT8 or not scheme.is_packed
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": {**_TOKEN, "num_bits": 8, "type": kind} if by_token else None,
        "output_activations": None,
        "format": layout,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *plain],
    }


def _copy_others(source: Path, out: Path) -> None:
    """Tokenizer, template, generation defaults: all small files but the weights and what describes them."""
    for file in sorted(source.iterdir()):
        if (
            file.is_file()
            and file.suffix in (".json", ".jinja", ".txt", ".model")
            and not (file.name == "config.json" or file.name.endswith(".index.json"))
        ):
            shutil.copyfile(file, out / file.name)
