"""The fallback: a decoder as transformers implements it, with our attention and KV cache."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from inferplane.api.attention import AttentionLayer
from inferplane.api.model import BuildContext, ForwardBatch, Model
from inferplane.config.engine import ConfigError
from inferplane.layers.attention import Attention
from inferplane.models.errors import ModelLoadError
from inferplane.models.transformers_attention import (
    ATTENTION,
    PagedLayer,
    check_tokens_meet_in_attention,
    install,
    record_calls,
    register,
    run_decoder,
    takes_positions,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.utils import ModelOutput

logger = logging.getLogger(__name__)

_ROPES_OF_A_BATCH = ("dynamic", "longrope")
"""Rotations that transformers chooses by the longest sequence of a batch."""


class TransformersModel(Model):
    """Tokens of all requests lie in one row, with their positions; they meet in attention alone, which is ours.

    Products, norms and experts are transformers' own, on one rank. What cannot run like that is refused with the
    reason, before weights are read where the model tells by then.
    """

    def __init__(self, ctx: BuildContext, prefix: str = "") -> None:
        super().__init__(ctx, prefix)
        self._ctx = ctx
        architecture = ctx.config.model.architecture
        _check_settings(ctx, architecture)
        register()
        self._config = _read_config(ctx.config.model.path)
        _check_class(architecture)
        _check_config(self._config, architecture)
        with torch.device("meta"):
            # Experts by one product each would ask the meta device for the tokens of each. transformers writes the
            # choice into the configuration it is given, and by it a model that runs would gather experts by token.
            self._whole = _from_config(
                copy.deepcopy(self._config), ctx.dtype, experts_implementation="batched_mm"
            )
        _check_model(self._whole, architecture)
        self._decoder: torch.nn.Module = self._whole.get_decoder()
        self._place = _place(self._whole, self._decoder)
        num_layers = self._config.get_text_config().num_hidden_layers
        self._attention: dict[str, Attention] = {}
        self._sinks: dict[str, torch.Tensor] = {}
        """``[num_heads]`` float32 by the name of the decoder's parameter, to be filled at loading."""
        for call in record_calls(self._decoder, num_layers):
            sinks = None
            if call.sinks is not None:
                sinks = torch.empty(call.num_heads, dtype=torch.float32, device=ctx.device)
                self._sinks[f"{call.name}.{call.sinks}"] = sinks
            self._attention[call.name] = Attention(
                ctx,
                f"{self._place}.{call.name}",
                num_heads=call.num_heads,
                num_kv_heads=call.num_kv_heads,
                head_dim=call.head_dim,
                scale=call.scale,
                window=call.window,
                soft_cap=call.soft_cap,
                sinks=sinks,
                kv_of=None if call.kv_of is None else self._attention[call.kv_of],
            )
        self._paged = {name: PagedLayer(each, ctx.dtype) for name, each in self._attention.items()}
        if ctx.comm.rank == 0:
            logger.warning(
                "there is no model file for %s: transformers' implementation runs it, with paged attention (the "
                "fallback), which is slower than a model file",
                architecture,
            )

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        for layer in self._paged.values():
            layer.batch = batch
        output = run_decoder(self._decoder, batch.token_ids.unsqueeze(0), batch.positions.unsqueeze(0))
        self._given.output_class = type(output)
        return output.last_hidden_state[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the whole model makes them of what its decoder gives."""
        self._given.hidden = hidden
        return self._whole(input_ids=hidden.new_zeros(1, len(hidden), dtype=torch.int64)).logits[0]

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        ctx = self._ctx
        if ctx.device.type == "meta":  # to be explained, not run
            return
        if ctx.config.load.load_format == "dummy":
            # the host's state alone: nothing else draws from a device's, which not every platform can save
            with torch.random.fork_rng(devices=[], device_type="cpu"), ctx.device:
                torch.manual_seed(ctx.config.seed)
                self._whole = _from_config(self._config, ctx.dtype)
        else:
            self._whole = _filled(type(self._whole), self._config, ctx.dtype, tensors).to(ctx.device)
        self._whole.eval()
        self._decoder = self._whole.get_decoder()
        check_tokens_meet_in_attention(
            self._decoder, list(self._paged), ctx.config.model.vocab_size, ctx.device
        )
        install(self._decoder, self._paged)
        for name, sinks in self._sinks.items():
            sinks.copy_(self._decoder.get_parameter(name))
        self._given = _Given()
        self._whole.set_submodule(self._place, self._given)

    def attention_layers(self) -> list[AttentionLayer]:
        return [layer.description for layer in self._attention.values() if layer.kv_of is None]


class _Given(torch.nn.Module):
    """Stands where a whole model has its decoder, and gives what that one has given before."""

    output_class: type[ModelOutput]
    hidden: torch.Tensor
    """``[n, hidden_size]``"""

    def forward(self, *args: Any, **options: Any) -> ModelOutput:
        return self.output_class(last_hidden_state=self.hidden.unsqueeze(0))


def _check_settings(ctx: BuildContext, architecture: str) -> None:
    if ctx.comm.world_size > 1:
        raise ConfigError(
            "tensor_parallel_size",
            f"{architecture} has no model file and runs by transformers' implementation, on one rank, not "
            f"{ctx.comm.world_size}",
        )
    if ctx.quantization is not None:
        raise ConfigError(
            "quantization",
            f"{architecture} has no model file and runs by transformers' implementation, with weights as they are: "
            "quantized ones need a model file",
        )
    if ctx.config.kv_dtype.startswith("fp8"):
        raise ConfigError(
            "kv_cache_dtype",
            f"{architecture} has no model file and runs by transformers' implementation, which has no scales of keys "
            f"and values: leave out {ctx.config.kv_dtype}",
        )
    if ctx.config.count_expert_tokens:
        raise ConfigError(
            "count_expert_tokens",
            f"{architecture} has no model file and runs by transformers' implementation, whose routers are not "
            "counted: leave it out",
        )


def _read_config(path: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # its validators raise errors of many classes
        raise ModelLoadError(f"{path}: transformers cannot read its config.json: {error}") from error


def _check_config(config: PreTrainedConfig, architecture: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError(f"{architecture} is an encoder with a decoder, which the fallback does not run")
    for rope_type in _values_of("rope_type", getattr(config.get_text_config(), "rope_parameters", None)):
        if rope_type in _ROPES_OF_A_BATCH:
            raise ModelLoadError(
                f"rope_type {rope_type!r} of {architecture}: transformers chooses the rotation by the longest sequence "
                "of a batch, so that requests would change each other's answers in the fallback"
            )


def _check_class(architecture: str) -> None:
    """Whether transformers says of it that its attention can be replaced, and that it keeps no state."""
    import transformers

    model_class = getattr(transformers, architecture)
    if model_class._is_stateful:
        raise ModelLoadError(
            f"{architecture} keeps a state between tokens, which the fallback does not: it needs a model file"
        )
    if not model_class._supports_attention_backend:
        raise ModelLoadError(
            f"{architecture}: transformers' implementation computes attention itself, so that the fallback cannot "
            "replace it: it needs a model file"
        )


def _check_model(model: PreTrainedModel, architecture: str) -> None:
    if type(model).__name__ != architecture:
        raise ModelLoadError(
            f"architectures names {architecture}, but model_type {model.config.model_type!r} is transformers' "
            f"{type(model).__name__}"
        )
    if not takes_positions(model.get_decoder()):
        raise ModelLoadError(
            f"{architecture}: transformers' implementation counts positions itself, so that the fallback cannot give "
            "each request its own: it needs a model file"
        )


def _place(whole: PreTrainedModel, decoder: torch.nn.Module) -> str:
    """The name of the decoder's module."""
    place = next(name for name, module in whole.named_modules() if module is decoder)
    if not place:
        raise ModelLoadError(f"{type(whole).__name__}: transformers does not tell its decoder from its head")
    return place


def _from_config(config: PreTrainedConfig, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION, **options)
    except Exception as error:  # whatever their code makes of a configuration
        raise ModelLoadError(
            f"transformers cannot build a decoder of model_type {config.model_type!r}: {error}"
        ) from error


def _filled(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    dtype: torch.dtype,
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> PreTrainedModel:
    """transformers renames, stacks and ties what older checkpoints have; it is told what to load, and reads no file."""
    stored = dict(tensors)
    with _without_bars():
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict=stored,
            dtype=dtype,
            attn_implementation=ATTENTION,
            output_loading_info=True,
        )
    faults = {
        "missing": report["missing_keys"],
        "unexpected": report["unexpected_keys"],
        "wrong shape": [name for name, *_ in report["mismatched_keys"]],
    }
    shown = [f"{kind}: {', '.join(sorted(names)[:20])}" for kind, names in faults.items() if names]
    if shown:
        raise ModelLoadError(f"the checkpoint does not fit {model_class.__name__}: {'; '.join(shown)}")
    return model


@contextmanager
def _without_bars() -> Iterator[None]:
    """Whoever wants a bar has seen ours while the tensors were read."""
    from transformers.utils.logging import (
        disable_progress_bar,
        enable_progress_bar,
        is_progress_bar_enabled,
    )

    was_enabled = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            enable_progress_bar()


def _values_of(key: str, table: Any) -> Iterator[Any]:
    """Of a table and of those within."""
    if isinstance(table, Mapping):
        if key in table:
            yield table[key]
        for value in table.values():
            yield from _values_of(key, value)
