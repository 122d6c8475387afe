"""Shipped tables are found by capability, and a card without one has none."""

from __future__ import annotations

from inferplane_kernels_cuda import tuning_file


def test_a_capability_without_a_table():
    assert tuning_file((1, 0)) is None
