"""Where the tests of this platform run."""

from triton_device import device, gpu

__all__ = ["device", "gpu"]
