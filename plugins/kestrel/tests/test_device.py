"""The card behaves as a card: its memory is out of the host's reach, counted, and limited."""

from __future__ import annotations

import gc

import pytest
import torch

from inferplane_kestrel import device as cards

CARD = 7
"""One that no engine in this process uses, so that its memory is this file's alone."""
TOTAL_BYTES = 1 << 20


@pytest.fixture
def card() -> torch.device:
    return cards.connect(CARD, TOTAL_BYTES)


@pytest.mark.parametrize("is_inference", [False, True])
def test_numbers_go_there_and_come_back(card: torch.device, is_inference: bool):
    host = torch.randn(3, 5)
    with torch.inference_mode(is_inference):
        there = host.to(card, non_blocking=True)
        assert there.device == card
        assert type(there.cpu()) is torch.Tensor
        assert torch.equal(there.cpu(), host)
        assert torch.equal((there * 2)[1:, ::2].to("cpu", torch.float64), (host * 2)[1:, ::2].double())


def test_views_share_memory(card: torch.device):
    there = torch.zeros(2, 3, device=card)
    there[1].fill_(5.0)
    there.view(-1)[0] = 7.0
    assert there.cpu().tolist() == [[7.0, 0.0, 0.0], [5.0, 5.0, 5.0]]
    assert there.t().stride() == (1, 3)


def test_what_works_in_place_returns_its_argument(card: torch.device):
    there = torch.ones(3, device=card)
    assert there.add_(1) is there
    assert there.cpu().tolist() == [2.0] * 3


def test_the_host_cannot_reach_its_memory(card: torch.device):
    there = torch.ones(4, device=card)
    with pytest.raises((RuntimeError, TypeError)):
        there.numpy()
    with pytest.raises(RuntimeError, match="host memory, not on the card"):
        there + torch.ones(4)
    with pytest.raises(RuntimeError, match="host memory, not on the card"):
        torch.arange(4)[there.long()]


def test_two_cards_do_not_mix(card: torch.device):
    other = cards.connect(CARD + 1, TOTAL_BYTES)
    with pytest.raises(RuntimeError, match="several cards"):
        torch.ones(2, device=card) + torch.ones(2, device=other)


def test_memory_is_counted_while_any_view_lives(card: torch.device):
    memory = cards.memory_of(card)
    gc.collect()
    before = memory.used_bytes
    there = torch.empty(1024, device=card)
    view = there[10:20]
    assert memory.used_bytes == before + 4096
    del there
    assert memory.used_bytes == before + 4096
    del view
    assert memory.used_bytes == before


def test_a_full_card_says_so(card: torch.device):
    with pytest.raises(torch.OutOfMemoryError, match="Kestrel card"):
        torch.empty(TOTAL_BYTES, device=card)
