"""The KV tensors of one rank, and the attention metadata that each step needs for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from inferplane.api.attention import AttentionBackend, AttentionInputs, AttentionLayer
from inferplane.api.kv import KVCacheConfig, KVCacheSpec, MLAAttentionSpec
from inferplane.api.kv_dtype import stored_type
from inferplane.api.latents import ExpandedPrompts, StepCut
from inferplane.api.state import StateLayer, StateRound, allocate_states, refresh_rounds, state_rounds


class CacheKeeper(Protocol):
    """Lays out what layers of one kind keep between steps, and says what a step is to them: an attention backend, or
    `StateKeeper`."""

    name: ClassVar[str]
    graph_safe: ClassVar[bool]

    @classmethod
    def allocate_kv(
        cls, layer: Any, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor: ...

    def build_metadata(self, inputs: AttentionInputs) -> Any: ...

    def refresh_metadata(self, metadata: Any, inputs: AttentionInputs) -> None: ...


class StateKeeper:
    """Of layers with a state, which compute on it by themselves."""

    name: ClassVar[str] = "state"
    graph_safe: ClassVar[bool] = True

    @classmethod
    def allocate_kv(
        cls, layer: StateLayer, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return allocate_states(layer.spec, num_blocks, device)

    def build_metadata(self, inputs: AttentionInputs) -> tuple[StateRound, ...]:
        return state_rounds(inputs)

    def refresh_metadata(self, metadata: tuple[StateRound, ...], inputs: AttentionInputs) -> None:
        refresh_rounds(metadata, inputs)


class AttentionChooser:
    """Gives each attention layer its backend, and remembers which; one instance for all layers of one kind."""

    def __init__(self, choose: Callable[[AttentionLayer], type[AttentionBackend]]) -> None:
        self._choose = choose
        self._instances: dict[tuple[type[AttentionBackend], KVCacheSpec], AttentionBackend] = {}
        self._states = StateKeeper()

    def keeper(self, layer: AttentionLayer | StateLayer) -> CacheKeeper:
        """Of any layer that keeps something."""
        return self._states if isinstance(layer, StateLayer) else self(layer)

    def __call__(self, layer: AttentionLayer) -> AttentionBackend:
        backend_class = self._choose(layer)
        key = (backend_class, layer.spec)
        if key not in self._instances:
            self._instances[key] = backend_class()
        return self._instances[key]

    @property
    def names(self) -> list[str]:
        """Of the backends chosen so far."""
        return sorted({backend_class.name for backend_class, _ in self._instances})


@dataclass(frozen=True)
class KVGroup:
    """Layers that share block tables, on this rank."""

    block_size: int
    layers_of: tuple[tuple[CacheKeeper, tuple[str, ...]], ...]
    """Names of the group's layers by the backend instance that serves them."""
    cut: StepCut | None = None
    """Of a group of latents of which heads can make keys and values of their own."""

    def build_step(self, inputs: AttentionInputs) -> tuple[dict[str, Any], dict[str, ExpandedPrompts]]:
        """By layer name: the metadata of the requests that backends serve, None where these are none, and the others,
        if there are any."""
        names = [name for _, names in self.layers_of for name in names]
        served, prompts = (inputs, None) if self.cut is None else self.cut(inputs)
        metadata = self.build_metadata(served) if served.num_reqs else dict.fromkeys(names)
        return metadata, {} if prompts is None else dict.fromkeys(names, prompts)

    def build_metadata(self, inputs: AttentionInputs) -> dict[str, Any]:
        """By layer name; one object for all layers of a backend."""
        metadata = {}
        for backend, names in self.layers_of:
            metadata.update(dict.fromkeys(names, backend.build_metadata(inputs)))
        return metadata

    def refresh_metadata(self, metadata: Mapping[str, Any], inputs: AttentionInputs) -> None:
        """Of a graph that was recorded with what `build_metadata` returned."""
        for backend, names in self.layers_of:
            backend.refresh_metadata(metadata[names[0]], inputs)

    @property
    def unsafe_backends(self) -> list[str]:
        """Names of the backends that cannot be recorded in a graph."""
        return sorted({backend.name for backend, _ in self.layers_of if not backend.graph_safe})


def make_groups(
    kv_config: KVCacheConfig,
    layers: Sequence[AttentionLayer | StateLayer],
    backend_of: Callable[[AttentionLayer | StateLayer], CacheKeeper],
) -> list[KVGroup]:
    by_name = {layer.name: layer for layer in layers}
    groups = []
    for group in kv_config.groups:
        names_of: dict[CacheKeeper, list[str]] = {}
        for name in group.layer_names:
            names_of.setdefault(backend_of(by_name[name]), []).append(name)
        layers_of = tuple((backend, tuple(names)) for backend, names in names_of.items())
        cut = _cut_of([by_name[name] for name in group.layer_names], names_of)
        groups.append(KVGroup(group.spec.block_size, layers_of, cut))
    return groups


def _cut_of(layers: Sequence[AttentionLayer | StateLayer], keepers: Iterable[CacheKeeper]) -> StepCut | None:
    """None where a backend keeps latents otherwise than as rows, or layers differ in what heads make of them."""
    first = layers[0]
    if not isinstance(first, AttentionLayer) or not isinstance(first.spec, MLAAttentionSpec):
        return None
    keep_rows = all(getattr(keeper, "keeps_latent_rows", False) for keeper in keepers)
    heads = {each.latent_heads for each in layers if isinstance(each, AttentionLayer)}
    if first.latent_heads is None or len(heads) > 1 or not keep_rows:
        return None
    return StepCut(first.spec, first.latent_heads)


def allocate(
    kv_config: KVCacheConfig,
    layers: Sequence[AttentionLayer | StateLayer],
    backend_of: Callable[[AttentionLayer | StateLayer], CacheKeeper],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The KV tensor of every layer, by name; layers of different groups of one pool share theirs. ``dtype`` is the
    activations'.

    Raises `ValueError` for layers that were to share memory which their backends arrange differently.
    """
    by_name = {layer.name: layer for layer in layers}
    kv: dict[str, torch.Tensor] = {}
    for num_blocks, names in kv_config.memory():
        backends = {type(backend_of(by_name[name])) for name in names}
        if len(backends) > 1:
            shown = ", ".join(sorted(backend.name for backend in backends))
            raise ValueError(f"layers {', '.join(names)} cannot share memory: they are served by {shown}")
        layer = by_name[names[0]]
        tensor = backends.pop().allocate_kv(layer, num_blocks, stored_type(layer.spec, dtype), device)
        kv.update(dict.fromkeys(names, tensor))
    return kv
