"""`KVListening`: tells plugins' listeners what enters and leaves the prefix cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from inferplane.config import EngineConfig
from inferplane.kvcache import KVCacheListener
from inferplane.plugins.record import PluginError
from inferplane.plugins.target import import_target

logger = logging.getLogger(__name__)

_METHODS = ("block_stored", "block_removed", "cache_cleared")


def make_kv_listener(targets: Sequence[str], config: EngineConfig) -> KVCacheListener | None:
    """One that stands for all; None where there are none, so that nothing is called.

    Raises `PluginError` for a target that cannot be imported or is no listener.
    """
    made = []
    for target in targets:
        found = import_target(target, "a KV cache listener")
        if not all(callable(getattr(found, method, None)) for method in _METHODS):
            raise PluginError(
                f"{target} is offered as a KV cache listener, but has not all of {', '.join(_METHODS)}"
            )
        made.append(found(config))
    return KVListening(made) if made else None


class KVListening:
    """A listener that raises is logged once and not told again: it has missed something."""

    def __init__(self, listeners: Sequence[KVCacheListener]) -> None:
        self._listeners = list(listeners)

    def block_stored(self, key: bytes, parent: bytes | None, token_ids: list[int]) -> None:
        self._tell("block_stored", key, parent, token_ids)

    def block_removed(self, key: bytes) -> None:
        self._tell("block_removed", key)

    def cache_cleared(self) -> None:
        self._tell("cache_cleared")

    def _tell(self, method: str, *what: object) -> None:
        for listener in list(self._listeners):
            try:
                getattr(listener, method)(*what)
            except Exception:
                self._listeners.remove(listener)
                name = type(listener).__name__
                logger.exception("KV cache listener %s raised and is not called again", name)
