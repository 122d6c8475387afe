"""What loading takes at its peak: the model, and no more than one shard beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from repository import ROOT
from tiny_models import make_tiny_model

SHARD_BYTES = 16 << 20
SLACK_BYTES = 12 << 20
"""What the allocator keeps, and what Python makes on the way."""

LOAD = """
import sys, threading, time
from functools import partial
from pathlib import Path
import torch
from inferplane.models.loader.safetensors_folder import SafetensorsFolder
from inferplane.models.registry import load_model
from model_harness import make_context, read_config

def own_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024

def watch():
    while not done.is_set():
        peaks.append(own_bytes())
        time.sleep(0.0005)

folder = Path(sys.argv[1])
context = make_context(read_config(folder), dtype="bfloat16")
checkpoint = SafetensorsFolder(folder)
torch.zeros(1 << 20).bfloat16()
done, peaks, before = threading.Event(), [], own_bytes()
watcher = threading.Thread(target=watch)
watcher.start()
model = load_model(context, partial(checkpoint.tensors, progress=False))
after = own_bytes()
done.set()
watcher.join()
print(max(peaks) - before, after - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_peak_is_the_model_and_a_shard(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8}
    whole = AutoModelForCausalLM.from_pretrained(
        make_tiny_model("llama", tmp_path, **sizes), dtype=torch.float32
    )
    folder = tmp_path / "in-shards"
    whole.save_pretrained(folder, max_shard_size=SHARD_BYTES)
    shards = [file.stat().st_size for file in folder.glob("*.safetensors")]
    assert len(shards) > 4
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests/support")}
    found = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)], env=environment, capture_output=True, text=True, check=True
    )
    peak, kept = map(int, found.stdout.split())
    model_bytes = 2 * sum(parameter.numel() for parameter in whole.parameters())
    assert kept >= 0.9 * model_bytes, "the model is there"
    assert peak <= model_bytes + max(shards) + SLACK_BYTES
    assert model_bytes + max(shards) + SLACK_BYTES < 0.9 * sum(shards), "a copy of the checkpoint would show"
