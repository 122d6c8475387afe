"""Routers against those of transformers, and against the definition."""

from __future__ import annotations

import pytest
import torch

from inferplane.layers.router import Routing, choose_experts
from inferplane.models.errors import ModelLoadError


def test_sigmoid_with_bias_and_groups_as_in_transformers():
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    for renormalize in (True, False):
        config = DeepseekV3Config(
            hidden_size=32,
            n_routed_experts=16,
            n_group=4,
            topk_group=2,
            num_experts_per_tok=3,
            norm_topk_prob=renormalize,
            routed_scaling_factor=1.0,
        )
        torch.manual_seed(0)
        gate = theirs.DeepseekV3TopkRouter(config)
        torch.nn.init.normal_(gate.weight)
        bias = gate.e_score_correction_bias.normal_()
        hidden = torch.randn(200, 32)
        with torch.no_grad():
            logits, weights, ids = gate(hidden)
        routing = Routing(
            num_experts=16,
            top_k=3,
            score="sigmoid",
            renormalize=renormalize,
            num_groups=4,
            top_groups=2,
            best_of_group=2,
            has_selection_bias=True,
        )
        ours, our_ids = choose_experts(logits, routing, bias)
        order, our_order = ids.sort(-1), our_ids.long().sort(-1)
        assert torch.equal(order.values, our_order.values)
        torch.testing.assert_close(ours.gather(1, our_order.indices), weights.gather(1, order.indices))


def test_experts_come_from_the_chosen_groups_and_count_by_their_scores():
    torch.manual_seed(1)
    logits = torch.randn(100, 12)
    routing = Routing(num_experts=12, top_k=4, renormalize=False, num_groups=3, top_groups=2)
    weights, ids = choose_experts(logits, routing, None)
    for row, chosen, weight in zip(logits, ids.tolist(), weights):
        groups = row.view(3, 4)
        best = groups.max(-1).values.topk(2).indices.tolist()
        allowed = [expert for expert in range(12) if expert // 4 in best]
        assert chosen == sorted(allowed, key=lambda expert: -row[expert])[:4]
        torch.testing.assert_close(weight, row.softmax(-1)[chosen])


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"num_experts": 4, "top_k": 5}, "num_experts_per_tok 5 should be 1 to 4"),
        ({"num_experts": 10, "top_k": 2, "num_groups": 4}, "10 experts cannot be in 4 groups"),
        ({"num_experts": 8, "top_k": 2, "num_groups": 2, "top_groups": 3}, "3 .topk_group. are chosen"),
        ({"num_experts": 8, "top_k": 5, "num_groups": 2}, "5 are more than the 4"),
    ],
)
def test_numbers_that_cannot_go_together_are_named(numbers: dict[str, int], message: str):
    with pytest.raises(ModelLoadError, match=message):
        Routing(**numbers)
