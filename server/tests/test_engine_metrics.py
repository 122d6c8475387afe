"""What `/metrics` says of the engine's figures."""

from __future__ import annotations

from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from inferplane.engine.stats import EngineStats
from inferplane_server.metrics import ServerMetrics


def families(stats: EngineStats) -> dict[str, list[tuple[dict[str, str], float]]]:
    text = ServerMetrics(lambda: stats).render().decode()
    return {
        family.name: [(sample.labels, sample.value) for sample in family.samples]
        for family in text_string_to_metric_families(text)
    }


def test_tokens_of_experts_are_there_when_they_are_counted() -> None:
    idle = EngineStats.at_start()
    assert "inferplane_expert_tokens" not in families(idle)
    counted = families(replace(idle, expert_tokens={"layers.0.gate": [5, 0], "layers.1.gate": [2, 3]}))
    assert counted["inferplane_expert_tokens"] == [
        ({"layer": "layers.0.gate", "expert": "0"}, 5.0),
        ({"layer": "layers.0.gate", "expert": "1"}, 0.0),
        ({"layer": "layers.1.gate", "expert": "0"}, 2.0),
        ({"layer": "layers.1.gate", "expert": "1"}, 3.0),
    ]
