"""The core names no vendor, no vendor's interface and no operating system, in code or comment."""

from __future__ import annotations

import re

import pytest

from repository import ROOT, shown, text_files

# Letters delimit a word here, not underscores: is_cuda and cuda_graph both name a vendor.
FORBIDDEN = re.compile(
    r"(?<![a-z])("
    r"nvidia|cuda|cudnn|cublas|cutlass|nccl|rccl|nvml|pynvml|triton|flash[-_]?attn"
    r"|amd|rocm|hip|miopen|intel|xpu|ipex|oneapi|sycl|apple|mps|ascend|npu|tpu|gaudi|habana|neuron|qualcomm"
    r"|amx|avx\d*|h100|h200|sm_\d+|gfx\d+"
    r")(?![a-z])"
    # To report the operating system is fine, to branch on it is not.
    r"|sys\.platform|os\.(?:uname|name)\b|platform\.(?:system|machine|processor)\(\)(?:\.\w+\(\))?\s*(?:[=!]=|in\b|not\b)",
    re.IGNORECASE,
)


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "if tensor.is_cuda:",
        "device = 'XPU:0'",
        "# an NVIDIA card",
        "use_cuda_graph = True",
        "if sys.platform == 'linux':",
        "if platform.system() == 'Linux':",
        "if platform.machine().lower() in ('arm64',):",
        "backend='nccl'",
    ],
)
def test_the_pattern_finds(line: str):
    assert FORBIDDEN.search(line)


@pytest.mark.parametrize(
    "line", ["platform.name", "hipster damps", "{platform.system()}", "interval", "campus"]
)
def test_the_pattern_leaves_alone(line: str):
    assert not FORBIDDEN.search(line)


def test_the_core_names_no_vendor():
    files = text_files("core/src")
    assert len(files) > 10, "the core's sources were not found"
    found = [
        f"{shown(path)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert not found, "a device's name belongs in its platform plugin:\n" + "\n".join(found)


def test_no_file_of_the_core_is_named_after_a_vendor():
    assert not [
        shown(path) for path in text_files("core/src") if FORBIDDEN.search(str(path.relative_to(ROOT)))
    ]
