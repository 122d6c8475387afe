"""What a platform's worker does not honour is refused by name, never ignored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from inferplane import LLM, SamplingParams
from inferplane.request import ParameterError
from toy_plugins import ToyIndex

PLUGIN = """
from inferplane.api import *
MANIFEST = PluginManifest(name="plain", api=API_VERSION, provides=("platform",))
@hookimpl
def probe_devices(): return Supported("plain", 1, (DeviceDescriptor("plain", 0, "plain card", 1 << 30),))
@hookimpl
def create_platform(device):
    if device.platform != "plain": return None
    from inferplane.reference.platform import ReferencePlatform
    class Plain(ReferencePlatform):
        def unsupported_sampling(self):
            return {
                "frequency_penalty": "the card counts no tokens",
                "repetition_penalty": "the card counts no tokens",
                "logprobs": "the card keeps no probabilities",
            }
    return Plain()
"""


def test_a_feature_that_the_worker_lacks(
    toys: ToyIndex, tiny_model: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    toys.install("plain", PLUGIN)
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.2, "top_k": 5}))
    with LLM(str(folder), device="plain", kv_cache_bytes=4 << 20) as llm:
        assert llm.generation_defaults == {"top_k": 5}
        assert any("recommends repetition_penalty, which platform plain" in r.message for r in caplog.records)
        for name, value in (("frequency_penalty", 0.5), ("repetition_penalty", 1.2), ("logprobs", 0)):
            with pytest.raises(ParameterError, match=f"{name} cannot be served here: the card") as caught:
                llm.generate("a", SamplingParams(**{name: value}), use_tqdm=False)  # type: ignore[arg-type]
            assert caught.value.param == name
        answer = llm.generate(
            "a", SamplingParams(frequency_penalty=0.0, presence_penalty=1.0), use_tqdm=False
        )
        assert len(answer[0].outputs[0].token_ids) > 0
