"""Where the tests of the shared parts run."""

from triton_device import device

__all__ = ["device"]
