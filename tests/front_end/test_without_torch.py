"""The process that talks to clients resolves the configuration, tokenizes and applies templates without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FRONT_END = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} was imported")
sys.meta_path.insert(0, Refuse())

from inferplane.config import EngineArgs
from inferplane.config.resolve import resolve
from inferplane.engine.front_end import FrontEnd
from inferplane.plugins import load_plugins

args, plugins = EngineArgs(model=sys.argv[1]), load_plugins()
tokenizer = FrontEnd.open(args, resolve(args, plugins, progress=False), plugins).tokenizer
prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Bonjour, 42!"}])
print(tokenizer.decode(tokenizer.encode(prompt, add_special_tokens=False), skip_special_tokens=False))
"""


@pytest.fixture(params=["gguf", "folder"])
def model(request: pytest.FixtureRequest, smollm2_gguf: Path, tiny_model) -> Path:
    return smollm2_gguf if request.param == "gguf" else tiny_model("llama")


def test_configuration_and_prompts_need_no_torch(model: Path):
    command = [sys.executable, "-c", FRONT_END, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("<|im_start|>user\nBonjour, 42!<|im_end|>\n<|im_start|>assistant\n\n")
