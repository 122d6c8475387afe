"""Memory of weights."""

import torch

from inferplane_kernels_cpu.pages import Pages, move_weight


def test_parts_are_aligned_and_do_not_overlap():
    pages = Pages()
    parts = [pages.take(size) for size in (1, 64, 100, 20 << 20, 17 << 20, 3)]
    for number, part in enumerate(parts):
        assert part.data_ptr() % 64 == 0
        assert not part.any()
        part.fill_(number + 1)
    assert all((part == number + 1).all() for number, part in enumerate(parts))


def test_a_moved_weight_has_its_numbers_in_new_memory():
    whole = torch.randn(40, 30).bfloat16()
    weight = whole[3:37, 2:29]
    expected, before = weight.clone(), weight.data_ptr()
    move_weight(weight)
    assert torch.equal(weight, expected)
    assert weight.is_contiguous()
    assert weight.data_ptr() != before
    assert torch.equal(whole[3:37, 2:29], expected)
