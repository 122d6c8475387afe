"""Which class runs which architecture. Free of torch until a model is built."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from inferplane.models.errors import ModelLoadError
from inferplane.models.fallback import FALLBACK, has_fallback

if TYPE_CHECKING:
    import torch

    from inferplane.api.model import BuildContext, Model

BUILT_IN: Mapping[str, str] = {
    "BambaForCausalLM": "inferplane.models.bamba:BambaForCausalLM",
    "BertForMaskedLM": "inferplane.models.bert:BertModel",
    "BertForSequenceClassification": "inferplane.models.bert:BertForSequenceClassification",
    "BertModel": "inferplane.models.bert:BertModel",
    "Cohere2ForCausalLM": "inferplane.models.cohere:Cohere2ForCausalLM",
    "CohereForCausalLM": "inferplane.models.cohere:CohereForCausalLM",
    "DeepseekV2ForCausalLM": "inferplane.models.deepseek:DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "inferplane.models.deepseek:DeepseekV3ForCausalLM",
    "FalconForCausalLM": "inferplane.models.gpt:FalconForCausalLM",
    "FalconH1ForCausalLM": "inferplane.models.bamba:FalconH1ForCausalLM",
    "Gemma2ForCausalLM": "inferplane.models.gemma:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "inferplane.models.gemma:Gemma3ForCausalLM",
    "GemmaForCausalLM": "inferplane.models.gemma:GemmaForCausalLM",
    "Glm4ForCausalLM": "inferplane.models.glm:Glm4ForCausalLM",
    "Glm4MoeForCausalLM": "inferplane.models.glm:Glm4MoeForCausalLM",
    "GlmForCausalLM": "inferplane.models.glm:GlmForCausalLM",
    "GPT2LMHeadModel": "inferplane.models.gpt:GPT2LMHeadModel",
    "GPTNeoXForCausalLM": "inferplane.models.gpt:GPTNeoXForCausalLM",
    "GptOssForCausalLM": "inferplane.models.gpt_oss:GptOssForCausalLM",
    "GraniteForCausalLM": "inferplane.models.granite:GraniteForCausalLM",
    "GraniteMoeForCausalLM": "inferplane.models.granite:GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM": "inferplane.models.granite:GraniteMoeHybridForCausalLM",
    "JambaForCausalLM": "inferplane.models.jamba:JambaForCausalLM",
    "Lfm2ForCausalLM": "inferplane.models.lfm2:Lfm2ForCausalLM",
    "Llama4ForCausalLM": "inferplane.models.llama4:Llama4ForCausalLM",
    "LlamaForCausalLM": "inferplane.models.llama:LlamaForCausalLM",
    "LlamaForSequenceClassification": "inferplane.models.pooling_llama:LlamaForSequenceClassification",
    "LlamaModel": "inferplane.models.pooling_llama:LlamaModel",
    "Mamba2ForCausalLM": "inferplane.models.mamba:Mamba2ForCausalLM",
    "MambaForCausalLM": "inferplane.models.mamba:MambaForCausalLM",
    "MistralForCausalLM": "inferplane.models.llama:MistralForCausalLM",
    "MistralForSequenceClassification": "inferplane.models.pooling_llama:MistralForSequenceClassification",
    "MistralModel": "inferplane.models.pooling_llama:MistralModel",
    "MixtralForCausalLM": "inferplane.models.sparse:MixtralForCausalLM",
    "ModernBertForMaskedLM": "inferplane.models.modernbert:ModernBertModel",
    "ModernBertForSequenceClassification": "inferplane.models.modernbert:ModernBertForSequenceClassification",
    "ModernBertModel": "inferplane.models.modernbert:ModernBertModel",
    "NemotronHForCausalLM": "inferplane.models.nemotron_h:NemotronHForCausalLM",
    "Olmo2ForCausalLM": "inferplane.models.olmo:Olmo2ForCausalLM",
    "Olmo3ForCausalLM": "inferplane.models.olmo:Olmo3ForCausalLM",
    "OlmoeForCausalLM": "inferplane.models.olmo:OlmoeForCausalLM",
    "Phi3ForCausalLM": "inferplane.models.llama:Phi3ForCausalLM",
    "Qwen2ForCausalLM": "inferplane.models.llama:Qwen2ForCausalLM",
    "Qwen2ForSequenceClassification": "inferplane.models.pooling_llama:Qwen2ForSequenceClassification",
    "Qwen2Model": "inferplane.models.pooling_llama:Qwen2Model",
    "Qwen2MoeForCausalLM": "inferplane.models.sparse:Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM": "inferplane.models.llama:Qwen3ForCausalLM",
    "Qwen3ForSequenceClassification": "inferplane.models.pooling_llama:Qwen3ForSequenceClassification",
    "Qwen3Model": "inferplane.models.pooling_llama:Qwen3Model",
    "Qwen3MoeForCausalLM": "inferplane.models.sparse:Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM": "inferplane.models.qwen3_next:Qwen3NextForCausalLM",
    "RobertaForMaskedLM": "inferplane.models.bert:XLMRobertaModel",
    "RobertaForSequenceClassification": "inferplane.models.bert:XLMRobertaForSequenceClassification",
    "RobertaModel": "inferplane.models.bert:XLMRobertaModel",
    "Starcoder2ForCausalLM": "inferplane.models.gpt:Starcoder2ForCausalLM",
    "XLMRobertaForMaskedLM": "inferplane.models.bert:XLMRobertaModel",
    "XLMRobertaForSequenceClassification": "inferplane.models.bert:XLMRobertaForSequenceClassification",
    "XLMRobertaModel": "inferplane.models.bert:XLMRobertaModel",
}
"""``"module:Class"`` by the name in ``architectures`` of a Hugging Face configuration."""

_NONE: Mapping[str, str] = {}


def known_architectures(plugin_models: Mapping[str, str] = _NONE) -> dict[str, str]:
    """Every architecture that can run. A plugin's class takes the place of a built-in one of the same name."""
    return dict(sorted({**BUILT_IN, **plugin_models}.items()))


def find_target(architecture: str, plugin_models: Mapping[str, str] = _NONE) -> str:
    """``"module:Class"`` of an architecture, without importing it: `FALLBACK` where transformers alone has it.

    Raises `ModelLoadError` with those that are near.
    """
    known = known_architectures(plugin_models)
    if architecture in known:
        return known[architecture]
    if has_fallback(architecture):
        return FALLBACK
    near = difflib.get_close_matches(architecture, known, n=3, cutoff=0.75)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ModelLoadError(f"no model class runs {architecture!r}; {hint}There are: {', '.join(known)}")


def resolve_architecture(hf_config: Mapping[str, Any], plugin_models: Mapping[str, str] = _NONE) -> str:
    """The first of a configuration's ``architectures`` that has a class, or the first of all for the fallback.

    Raises `ModelLoadError` when none can run.
    """
    named = hf_config.get("architectures")
    if not isinstance(named, (list, tuple)) or not named or not all(isinstance(name, str) for name in named):
        raise ModelLoadError(
            f"architectures should name the model's class in its configuration, but is {named!r}"
        )
    known = known_architectures(plugin_models)
    architecture = next((name for name in named if name in known), named[0])
    find_target(architecture, plugin_models)
    return architecture


def why_one_rank(architecture: str, plugin_models: Mapping[str, str] = _NONE) -> str | None:
    """Why a model is not split over ranks, as far as that is known without building it."""
    if find_target(architecture, plugin_models) == FALLBACK:
        return "has no model file and runs by transformers' implementation"
    return None


def model_class(architecture: str, plugin_models: Mapping[str, str] = _NONE) -> type[Model]:
    """Imports the class of an architecture. Raises `ModelLoadError` naming the target that cannot be had."""
    from inferplane.api.model import Model

    target = find_target(architecture, plugin_models)
    module_name, _, class_name = target.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ModelLoadError(f"{target}, which runs {architecture}, cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Model)):
        raise ModelLoadError(
            f"{target}, which runs {architecture}, is no subclass of inferplane.api.model.Model"
        )
    return found


def build_model(ctx: BuildContext, plugin_models: Mapping[str, str] = _NONE) -> Model:
    """The model of ``ctx.config`` with empty weights. Raises `ModelLoadError` or `ConfigError` on what cannot run."""
    return model_class(ctx.config.model.architecture, plugin_models)(ctx)


def load_model(
    ctx: BuildContext,
    open_tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    plugin_models: Mapping[str, str] = _NONE,
) -> Model:
    """Builds the model and fills it, from ``open_tensors`` or, as ``load_format`` asks, with random values.

    Raises `ModelLoadError` naming the tensors that do not fit.
    """
    from inferplane.models.weights import dummy_tensors, weight_slots

    model = build_model(ctx, plugin_models)
    if ctx.config.load.load_format == "dummy":
        model.load_weights(dummy_tensors(weight_slots(model), ctx.config.seed, ctx.device))
    else:
        model.load_weights(_wanted(open_tensors(), ctx, {slot.name for slot in weight_slots(model)}))
    return model


def _wanted(
    tensors: Iterable[tuple[str, torch.Tensor]], ctx: BuildContext, names: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """All but what the format of the weights says to be a record of how they were made."""
    for name, tensor in tensors:
        if name in names or ctx.quantization is None or not ctx.quantization.may_drop(name, tensor):
            yield name, tensor
