"""How a model pools: from its configuration, and from the files that sentence-transformers writes beside it.

Free of torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inferplane.config.engine import PoolerConfig
from inferplane.models.errors import ModelLoadError
from inferplane.models.hf_fields import whole_number
from inferplane.models.json_file import read_json_table, read_optional_json_table

_KINDS = {"cls_token": "cls", "cls": "cls", "mean_tokens": "mean", "mean": "mean", "lasttoken": "last"}
"""By sentence-transformers' names, older and newer."""


def has_pooling(path: Path) -> bool:
    """Whether sentence-transformers wrote how to pool beside the model."""
    return any(kind == "Pooling" for kind, _ in _modules(path))


def read_pooler(path: Path, hf: Mapping[str, Any], task: str, *, is_encoder: bool) -> PoolerConfig:
    """Of a model for ``embed`` or ``classify``. Raises `ModelLoadError` naming the file and what cannot be honoured.

    Without sentence-transformers' files embeddings are normalised, and made of the mean of an encoder's hidden states
    or of a decoder's last one, which alone has seen all tokens.
    """
    if task == "classify":
        return _classifier(hf, is_encoder)
    settings = read_optional_json_table(path / "config_sentence_transformers.json")
    prompts = _prompts(settings)
    name = settings.get("default_prompt_name")
    common: dict[str, Any] = {
        "tasks": ("embed", "score"),
        "max_dimensions": whole_number(hf, "hidden_size"),
        "dimensions": _dimensions(hf),
        "prompts": prompts,
        "default_prompt": "" if name is None else prompts.get(name, ""),
    }
    modules = _modules(path)
    pooling = [folder for kind, folder in modules if kind == "Pooling"]
    if not pooling:
        kind = "mean" if is_encoder else "last"
        return PoolerConfig(kind=kind, normalize=True, source="default, for want of a modules.json", **common)
    if unknown := [kind for kind, _ in modules if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise ModelLoadError(
            f"{path / 'modules.json'}: has a module {unknown[0]}; known are Transformer, Pooling and Normalize"
        )
    kind = _kind(path / pooling[0] / "config.json", has_prompts=bool(prompts))
    normalizes = any(name == "Normalize" for name, _ in modules)
    return PoolerConfig(kind=kind, normalize=normalizes, source="modules.json", **common)


def sentence_length(path: Path) -> int | None:
    """The most tokens that an embedding is meant to be made of; None where no file says."""
    length = read_optional_json_table(path / "sentence_bert_config.json").get("max_seq_length")
    return length if isinstance(length, int) and length > 0 else None


def _classifier(hf: Mapping[str, Any], is_encoder: bool) -> PoolerConfig:
    labels = _labels(hf)
    kind = str(hf.get("classifier_pooling") or "cls") if is_encoder else "last"
    if kind not in ("cls", "mean", "last"):
        raise ModelLoadError(f"classifier_pooling is {kind!r}; known: cls and mean")
    tasks = ("classify", "score") if len(labels) == 1 else ("classify",)
    return PoolerConfig(kind=kind, tasks=tasks, labels=labels, activation=_activation(hf, len(labels)))


def _labels(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """transformers writes names or, where nobody gave any, their number; two classes are its default."""
    names = hf.get("id2label")
    if not isinstance(names, Mapping):
        return tuple(f"LABEL_{index}" for index in range(whole_number(hf, "num_labels", 2)))
    try:
        return tuple(str(names[key]) for key in sorted(names, key=int))
    except ValueError:
        raise ModelLoadError(f"id2label should map whole numbers to names, but is {names!r}") from None


def _activation(hf: Mapping[str, Any], num_labels: int) -> str:
    """A cross-encoder's own choice first, then what transformers' pipeline does."""
    nested = hf.get("sentence_transformers")
    own = nested.get("activation_fn") if isinstance(nested, Mapping) else None
    own = own or hf.get("sbert_ce_default_activation_function")
    if own is not None:
        name = str(own).rpartition(".")[2]
        if name not in ("Identity", "Sigmoid"):
            raise ModelLoadError(
                f"the cross-encoder's activation {own!r} is not known; known: Identity, Sigmoid"
            )
        return "none" if name == "Identity" else "sigmoid"
    problem = hf.get("problem_type")
    if problem == "regression":
        return "none"
    return "sigmoid" if problem == "multi_label_classification" or num_labels == 1 else "softmax"


def _dimensions(hf: Mapping[str, Any]) -> tuple[int, ...] | None:
    listed = hf.get("matryoshka_dimensions")
    if isinstance(listed, list) and all(isinstance(size, int) for size in listed):
        return tuple(listed)
    return None if hf.get("is_matryoshka") is True else ()


def _prompts(settings: Mapping[str, Any]) -> dict[str, str]:
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, Mapping) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelLoadError(
            f"config_sentence_transformers.json: prompts should map names to texts, but is {prompts!r}"
        )
    return dict(prompts)


def _modules(path: Path) -> list[tuple[str, str]]:
    """Kind and folder of each module, in order; none where there is no such file."""
    file = path / "modules.json"
    if not file.is_file():
        return []
    try:
        return [
            (str(module["type"]).rpartition(".")[2], str(module["path"]))
            for module in json.loads(file.read_bytes())
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise ModelLoadError(f"{file}: should be a list of modules with type and path ({error!r})") from None


def _kind(file: Path, *, has_prompts: bool) -> str:
    table = read_json_table(file)
    modes = [key.removeprefix("pooling_mode_") for key, on in table.items() if on is True and "_mode_" in key]
    named = table.get("pooling_mode")
    if isinstance(named, str):
        modes = [named]
    if len(modes) != 1 or modes[0] not in _KINDS:
        raise ModelLoadError(
            f"{file}: pools by {' and '.join(modes) or 'nothing'}; known, one at a time: {', '.join(_KINDS)}"
        )
    if has_prompts and table.get("include_prompt") is False:
        raise ModelLoadError(f"{file}: include_prompt is false; prompts are always part of what is pooled")
    return _KINDS[modes[0]]
