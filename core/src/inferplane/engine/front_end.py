"""`FrontEnd`: what `LLM` and `AsyncEngine` have in common on this side of the engine core. Free of torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferplane.config import EngineArgs, EngineConfig
from inferplane.engine.generation_config import announcement, sampling_defaults
from inferplane.engine.input_processor import InputProcessor
from inferplane.engine.output_processor import OutputProcessor
from inferplane.engine.pooling_output import pooling_announcement

if TYPE_CHECKING:
    from inferplane.models.source import ModelSource
    from inferplane.plugins import PluginSet
    from inferplane.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass
class FrontEnd:
    """Text and parameters in, text out, for one model."""

    config: EngineConfig
    tokenizer: Tokenizer
    inputs: InputProcessor
    outputs: OutputProcessor
    generation_defaults: dict[str, Any]
    """What the model recommends, by the names of `SamplingParams`; empty when it is turned off."""

    @classmethod
    def open(cls, args: EngineArgs, config: EngineConfig, plugins: PluginSet) -> FrontEnd:
        """Reads the tokenizer and the sampling defaults of the model. Raises `ModelLoadError`."""
        from inferplane.models.loader import load_generation_config
        from inferplane.models.source import ModelSource

        path = Path(config.model.path)
        source = ModelSource(config.model.model, "folder" if path.is_dir() else "gguf", path)
        tokenizer = _tokenizer(args, source)
        takes_advice = args.generation_config == "auto" and config.model.pooler is None
        defaults = sampling_defaults(load_generation_config(source)) if takes_advice else {}
        device = plugins.select_device(f"{config.device.platform}:{config.device.index}")
        unsupported = plugins.platform(device).unsupported_sampling()
        if lost := sorted(defaults.keys() & unsupported.keys()):
            names = ", ".join(lost)
            logger.warning(
                "the model recommends %s, which platform %s does not serve", names, device.platform
            )
        defaults = {name: value for name, value in defaults.items() if name not in unsupported}
        if defaults:
            logger.info(announcement(defaults))
        inputs = InputProcessor(
            tokenizer,
            max_model_len=config.model.max_model_len,
            vocab_size=config.model.vocab_size,
            eos_token_ids=sorted(tokenizer.eos_token_ids),
            logits_processors=plugins.logits_processors(),
            unsupported=unsupported,
            pooler=config.model.pooler,
        )
        if (pooler := config.model.pooler) is not None:
            logger.info(pooling_announcement(pooler))
        return cls(config, tokenizer, inputs, OutputProcessor(tokenizer), defaults)

    def set_max_model_len(self, max_model_len: int) -> None:
        """The length that the engine, once its memory is known, really serves."""
        self.config = replace(self.config, model=replace(self.config.model, max_model_len=max_model_len))
        self.inputs.max_model_len = max_model_len


def _tokenizer(args: EngineArgs, source: ModelSource) -> Tokenizer:
    from inferplane.models.loader import has_tokenizer, ids_only_tokenizer, load_tokenizer

    if args.skip_tokenizer_init:
        return ids_only_tokenizer(source)
    if args.load_format == "dummy" and not has_tokenizer(source):
        logger.info("%s has no tokenizer: prompts are token ids, and outputs have no text", source.path)
        return ids_only_tokenizer(source)
    return load_tokenizer(source)
