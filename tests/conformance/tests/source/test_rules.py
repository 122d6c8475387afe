"""What a plugin's source may not do is found, however it is written, and what it may do is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferplane_conformance.source.rules import foreign_imports, monkeypatches

PATCHES = [
    "import inferplane.runner.sampler\ninferplane.runner.sampler.Sampler = None",
    "from inferplane.runner import sampler as s\ns.Sampler.sample = None",
    "from inferplane.runner.sampler import Sampler\nsetattr(Sampler, 'sample', None)",
    "from inferplane.runner.sampler import Sampler\ndel Sampler.sample",
    "import inferplane\ninferplane.x, y = 1, 2",
    "import torch\ntorch.nn.functional.linear = None",
    "import sys\nsys.modules['inferplane.runner'] = None",
    "import sys\ndel sys.modules['inferplane']",
    "from sys import modules\nmodules['inferplane'] = None",
    "import sys\nsys.modules.update({})",
    "from unittest import mock\nmock.patch('inferplane.x').start()",
    "from unittest.mock import patch\npatch.object(int, 'x')",
    "from importlib import import_module\nimport_module('inferplane.runner').x = 1",
    "from inferplane.api.ops import OPS\nOPS['rms_norm'] = None",
    "from inferplane.api.ops import Op\nOp.__dict__['x'] = 1",
    "from inferplane.api.ops import OpTable\nfor OpTable.x in (): pass",
    "from inferplane.api.ops import OpTable\nOpTable.x += 1",
]
FINE = [
    "class A:\n    def __init__(self):\n        self.x = 1",
    "import torch\nx = torch.empty(3)\nx.requires_grad = False\nx[0] = 1",
    "import weakref\nweakref.finalize(object(), print).atexit = False",
    "import sys\nprint(sys.modules.get('torch'))",
    "import os\nvalue: os.PathLike",
    "from inferplane.api import Platform\nclass P(Platform):\n    name = 'p'",
    "def f(setattr_of):\n    setattr(setattr_of, 'x', 1)",
]
FOREIGN = [
    "import inferplane.runner",
    "from inferplane import LLM",
    "import inferplane",
    "def f():\n    from inferplane.runner.worker import ModelWorker",
    "import importlib\nimportlib.import_module('inferplane.runner')",
    "__import__('inferplane.scheduler')",
]
CONTRACT = [
    "from inferplane.api import Platform",
    "import inferplane.api.ops",
    "from inferplane.api.worker import ModelWorker",
    "import inferplane_kernels_cpu",
    "from . import sibling",
    "import inferplanet",
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "vendor.py"


@pytest.mark.parametrize("source", PATCHES)
def test_a_monkeypatch_is_found(file: Path, source: str):
    file.write_text(source)
    [found] = monkeypatches(file)
    assert found.startswith("vendor.py:2: ")


@pytest.mark.parametrize("source", FINE)
def test_what_a_file_does_to_its_own_is_no_monkeypatch(file: Path, source: str):
    file.write_text(source)
    assert monkeypatches(file) == []


@pytest.mark.parametrize("source", FOREIGN)
def test_an_import_beside_the_contract_is_found(file: Path, source: str):
    file.write_text(source)
    assert foreign_imports(file)


@pytest.mark.parametrize("source", CONTRACT)
def test_an_import_of_the_contract_is_fine(file: Path, source: str):
    file.write_text(source)
    assert foreign_imports(file) == []
