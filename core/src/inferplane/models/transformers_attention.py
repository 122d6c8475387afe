"""Attention in transformers' models: what their layers ask for, and our attention in its place.

transformers calls one function for every attention layer of a model. Ours asks the layer's module what to do, so that
nothing is global but the name under which the function is registered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from inferplane.api.model import ForwardBatch
from inferplane.layers.attention import Attention
from inferplane.models.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

ATTENTION = "inferplane"
"""``attn_implementation`` of transformers' models here. For a name that is none of its own it makes no mask."""
_HOOK = "inferplane_attention"
_MEANINGLESS = ("dropout", "position_ids", "use_cache", "output_attentions", "is_causal")
"""Options of the function that change nothing where nothing is trained and positions are rotated already."""

Hook = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, Mapping[str, Any]], torch.Tensor
]
"""query, key, value, each ``[1, heads, num_tokens, head_dim]``, mask and options to ``[1, num_tokens, heads, dim]``."""


def register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attend)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    return getattr(module, _HOOK)(query, key, value, attention_mask, options), None


@dataclass(frozen=True)
class AttentionCall:
    """What one layer of a model asks for."""

    name: str
    """Of its module."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: str | None
    """The module's parameter of a learned logit for each head that joins the softmax's denominator."""
    kv_of: str | None
    """The earlier layer whose keys and values it attends to, in place of its own."""


def record_calls(decoder: torch.nn.Module, num_layers: int) -> list[AttentionCall]:
    """What each layer asks for, in order: ``decoder``, on the meta device, is run once.

    Raises `ModelLoadError` where a layer asks for what paged attention does not do, or does not ask.
    """
    calls: list[AttentionCall] = []
    owners: dict[tuple[int, int], str] = {}
    """The first layer that came with a pair of keys and values."""
    kept: list[torch.Tensor] = []
    """All of them, because only of those that exist no two are the same."""

    def record(
        name: str,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        kept.extend((key, value))
        owner = owners.setdefault((id(key), id(value)), name)
        kv_of = None if owner == name else owner
        calls.append(_read_call(name, module, query, key, value, mask, options, kv_of))
        return _own_values(query, key, value, mask, options)

    for name, module in decoder.named_modules():
        setattr(module, _HOOK, partial(record, name, module))
    token = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode():
            run_decoder(decoder, token, token).last_hidden_state  # noqa: B018 - others have none
    except ModelLoadError:
        raise
    except Exception as error:  # whatever code of theirs does without a mask, a cache or values
        raise ModelLoadError(
            f"{type(decoder).__name__} does not run as the fallback runs it, without a mask and a cache of its own: "
            f"{type(error).__name__}: {error}"
        ) from error
    if len({call.name for call in calls}) != len(calls) or len(calls) != num_layers:
        raise ModelLoadError(
            f"attention of {type(decoder).__name__} is asked for {len(calls)} times by {num_layers} layers, where the "
            "fallback needs each to ask once: some attend in another way, or keep a state"
        )
    return calls


def run_decoder(decoder: torch.nn.Module, token_ids: torch.Tensor, positions: torch.Tensor) -> ModelOutput:
    """``token_ids, positions: [1, num_tokens]``; ``last_hidden_state`` of what it returns is that behind the norm,
    ``[1, num_tokens, hidden_size]``."""
    return decoder(input_ids=token_ids, position_ids=positions, use_cache=False)


def takes_positions(decoder: torch.nn.Module) -> bool:
    return "position_ids" in inspect.signature(decoder.forward).parameters


def _read_call(
    name: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: Mapping[str, Any],
    kv_of: str | None,
) -> AttentionCall:
    if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
        raise ModelLoadError(f"{name}: lets tokens see those behind them, which no KV cache can serve")
    if mask is not None:
        raise ModelLoadError(f"{name}: gives attention a mask of its own, which the fallback does not know")
    known = {"scaling", "sliding_window", "softcap", "s_aux", *_MEANINGLESS}
    odd = sorted(key for key, given in options.items() if given is not None and key not in known)
    if odd:
        raise ModelLoadError(f"{name}: gives attention {', '.join(odd)}, which the fallback does not know")
    head_dim = query.shape[-1]
    if key.shape[-1] != head_dim or value.shape[-1] > head_dim:
        raise ModelLoadError(
            f"{name}: has heads of {head_dim} in queries, {key.shape[-1]} in keys and {value.shape[-1]} in values; the "
            "fallback needs the first two to be equal and the last no larger"
        )
    scale = options.get("scaling")
    return AttentionCall(
        name=name,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else float(scale),
        window=options.get("sliding_window"),
        soft_cap=options.get("softcap"),
        sinks=_name_of_sinks(name, module, options.get("s_aux")),
        kv_of=kv_of,
    )


def _name_of_sinks(name: str, module: torch.nn.Module, sinks: torch.Tensor | None) -> str | None:
    if sinks is None:
        return None
    found = next((key for key, parameter in module.named_parameters() if parameter is sinks), None)
    if found is None:
        raise ModelLoadError(
            f"{name}: makes its attention sinks anew for each step, which the fallback does not know"
        )
    return found


class PagedLayer:
    """Our attention as one layer of a transformers model."""

    def __init__(self, attention: Attention, dtype: torch.dtype) -> None:
        self._attention = attention
        self._dtype = dtype
        self._head_dim = attention.description.head_dim
        self.batch: ForwardBatch | None = None
        """The step that the model is run for."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        assert self.batch is not None, "a model is run for a step"
        q, k, v = (x[0].transpose(0, 1).to(self._dtype).contiguous() for x in (query, key, value))
        value_dim = v.shape[-1]
        if value_dim < self._head_dim:
            v = torch.nn.functional.pad(v, (0, self._head_dim - value_dim))
        return self._attention(q, k, v, self.batch)[..., :value_dim].unsqueeze(0).to(query.dtype)


def install(decoder: torch.nn.Module, layers: Mapping[str, Hook]) -> None:
    """From now on the modules of these names attend by ``layers``."""
    for name, layer in layers.items():
        setattr(decoder.get_submodule(name), _HOOK, layer)


@torch.no_grad()
def check_tokens_meet_in_attention(
    decoder: torch.nn.Module, names: list[str], vocab_size: int, device: torch.device
) -> None:
    """Tokens of all requests lie in one row, so that nothing but attention may look from one to another.

    With attention that sees nothing but each token itself, a token's hidden state must not change with its neighbours.
    Raises `ModelLoadError` where it does, or is not finite.
    """
    install(decoder, dict.fromkeys(names, _own_values))
    positions = torch.arange(4, device=device).unsqueeze(0)
    rows = [torch.tensor([row], device=device) % vocab_size for row in ([1, 2, 3, 4], [5, 2, 6, 4])]
    hidden = torch.cat([run_decoder(decoder, row, positions).last_hidden_state for row in rows])
    if not hidden.isfinite().all():
        raise ModelLoadError(
            f"{type(decoder).__name__} gives numbers that are not finite in {hidden.dtype}: use another --dtype"
        )
    first, second = hidden[:, 1::2].float()
    # products of other shapes, as experts have them, may round in another way
    if not torch.allclose(first, second, rtol=0, atol=0.02 * float(first.abs().max())):
        raise ModelLoadError(
            f"{type(decoder).__name__} mixes neighbouring tokens outside of attention, as convolutions and states do, "
            "which the fallback cannot keep for each request"
        )


def _own_values(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Attention of tokens that see themselves alone."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2)
