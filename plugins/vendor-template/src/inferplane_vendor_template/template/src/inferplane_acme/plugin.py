"""The plugin's hooks. Imported at every start of InferPlane, so everything heavy is imported inside a hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from inferplane.api import Platform, PluginManifest, Supported, Unsupported, hookimpl
from inferplane_acme.probing import find_devices

if TYPE_CHECKING:
    from inferplane.api.ops import OpImpl

MANIFEST = PluginManifest(name="acme", api=(2, 0), provides=("platform",))


@hookimpl
def probe_devices() -> Supported | Unsupported:
    """Yours: why there is none, with what to do about it, and the score."""
    devices = find_devices()
    if not devices:
        return Unsupported("acme", "no Acme device was found")
    # 0 is the reference platform, 10 a plain CPU, 100 an accelerator that should be used unless another is asked for.
    return Supported("acme", score=5, devices=devices)


@hookimpl
def create_platform() -> Platform:
    from inferplane_acme.platform import AcmePlatform

    return AcmePlatform()


@hookimpl
def op_implementations() -> Sequence[OpImpl]:
    from inferplane_acme.ops import OP_IMPLEMENTATIONS

    return OP_IMPLEMENTATIONS
