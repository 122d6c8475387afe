"""What ``inferplane plugins doctor xpu`` says beyond the probe."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from inferplane.api import Diagnostic, Health
from inferplane_torch_accelerator.torch_build import why_not_built_for
from inferplane_torch_accelerator.triton_build import why_no_triton
from inferplane_xpu.cards import DriverError, read_cards, require_loader

ENDED = "intel-extension-for-pytorch"
"""Its last release, 2.8, is for torch 2.8; what it brought is in torch itself by now."""


def diagnostics() -> list[Diagnostic]:
    """GPUs, loader, torch, triton, and packages of the past. Imports none of them."""
    return [_cards(), _loader(), _torch(), _triton(), *_extension()]


def _cards() -> Diagnostic:
    try:
        cards = read_cards()
    except DriverError as error:
        return Diagnostic("GPUs", Health.WARNING, str(error))
    return Diagnostic(
        "GPUs", Health.OK, ", ".join(f"{card.device_id:#06x} ({card.driver})" for card in cards)
    )


def _loader() -> Diagnostic:
    try:
        require_loader()
    except DriverError as error:
        return Diagnostic("Level Zero", Health.WARNING, str(error), "install libze1 and libze-intel-gpu1")
    return Diagnostic("Level Zero", Health.OK, "the loader is there")


def _torch() -> Diagnostic:
    reason = why_not_built_for("xpu", "XPU")
    if reason is None:
        return Diagnostic("torch build", Health.OK, "for XPU")
    return Diagnostic("torch build", Health.WARNING, reason, "install torch from its index for XPU")


def _triton() -> Diagnostic:
    reason = why_no_triton("intel")
    if reason is None:
        return Diagnostic("triton", Health.OK, "compiles for Intel GPUs")
    mend = "install the triton that torch's index for XPU has beside torch"
    return Diagnostic("triton", Health.WARNING, f"{reason}: attention and ops run on torch alone", mend)


def _extension() -> list[Diagnostic]:
    try:
        found = version(ENDED)
    except PackageNotFoundError:
        return []
    said = f"{ENDED} {found} is installed; it ended with torch 2.8 and is not used"
    return [Diagnostic("extension", Health.WARNING, said, f"pip uninstall {ENDED}")]
