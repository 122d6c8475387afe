"""What ``inferplane plugins doctor rocm`` says beyond the probe."""

from __future__ import annotations

from inferplane.api import Diagnostic, Health
from inferplane_rocm.aiter_package import why_no_aiter
from inferplane_rocm.topology import DriverError, driver_version, read_gpus
from inferplane_torch_accelerator.torch_build import why_not_built_for
from inferplane_torch_accelerator.triton_build import why_no_triton


def diagnostics() -> list[Diagnostic]:
    """Driver, torch, triton and AITER. Imports none of them."""
    return [_driver(), _torch(), _triton(), _aiter()]


def _driver() -> Diagnostic:
    try:
        gpus = read_gpus()
    except DriverError as error:
        mend = "install the amdgpu driver, or let this process use its devices"
        return Diagnostic("driver", Health.WARNING, str(error), mend)
    version = driver_version() or "the kernel's own"
    return Diagnostic(
        "driver", Health.OK, f"{version}; {', '.join(gpu.architecture for gpu in gpus) or 'no GPU'}"
    )


def _torch() -> Diagnostic:
    reason = why_not_built_for("hip", "ROCm")
    if reason is None:
        return Diagnostic("torch build", Health.OK, "for ROCm")
    return Diagnostic("torch build", Health.WARNING, reason, "install torch from its index for ROCm")


def _triton() -> Diagnostic:
    reason = why_no_triton("amd")
    if reason is None:
        return Diagnostic("triton", Health.OK, "compiles for AMD GPUs")
    mend = "install the triton that torch's index for ROCm has beside torch"
    return Diagnostic("triton", Health.WARNING, f"{reason}: attention and ops run on torch alone", mend)


def _aiter() -> Diagnostic:
    reason = why_no_aiter()
    return Diagnostic("AITER", Health.OK, reason or "used for prompts in half precision")
