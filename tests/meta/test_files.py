"""Files stay readable, finished and free of the machine that they were written on."""

from __future__ import annotations

import ast
import re
import statistics
from pathlib import Path

import pytest

from inferplane.models.catalog import CATALOG
from repository import ROOT, native_files, repository_files, shown, source_files, text_files

MAX_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_FILE_BYTES = 1 << 20
MAX_MEDIAN_MODEL_LINES = 200
MAX_WEIGHTS_BYTES = 5_000_000
"""Of a trained model that tests need."""

MODELS = ROOT / "core/src/inferplane/models"
NO_NAMES_OF_FAMILIES = {"mamba"}
"""A kind of layer, too, with a spec of its own."""

# Spelled in pieces, so that this file does not find itself.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:wor[k]|roo[t]|far[m]|hom[e]/\w+|User[s]/\w+|tmp/[v])/")
REGISTRY_HOST = re.compile(
    r"pypi\.or[g]|pythonhoste[d]|download\.pytorc[h]|registry\.np[m]|npmjs\.co[m]|crates\.i[o]|debian\.or[g]"
)
UNFINISHED = re.compile(r"\b(?:TO[D]O|FIXM[E]|XX[X]|HAC[K])\b")
NAMELESS = re.compile(r"^(?:util|helper|misc|common)s?(?:\.py)?$")


def lines_that_match(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    return [
        f"{shown(path)}:{number}: {line.strip()[:120]}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_path_of_one_machine():
    assert not lines_that_match(MACHINE_PATH, text_files())


def test_no_registry_host():
    assert not lines_that_match(REGISTRY_HOST, text_files())


def test_no_unfinished_word():
    assert not lines_that_match(
        UNFINISHED, [p for p in text_files() if p.suffix in (".py", ".md", ".toml", ".ini")]
    )


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (MACHINE_PATH, "open('/" + "work/main/x')"),
        (MACHINE_PATH, "/" + "home/ann/models"),
        (REGISTRY_HOST, "https://pypi." + "org/simple"),
        (UNFINISHED, "# TO" + "DO: later"),
    ],
)
def test_the_patterns_find(pattern: re.Pattern[str], line: str):
    assert pattern.search(line)


def test_source_files_can_be_read_in_one_sitting():
    files = [*source_files(), *native_files()]
    lengths = {shown(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {"attention.cpp", "plugin_set.py"} <= {path.name for path in files}
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES}


def test_a_model_file_is_short_and_layers_know_no_family():
    models = [path for path in source_files() if path.parent == MODELS]
    lengths = [len(path.read_text(encoding="utf-8").splitlines()) for path in models]
    assert len(lengths) > 20 and statistics.median(lengths) <= MAX_MEDIAN_MODEL_LINES
    families = {facts.family.lower() for facts in CATALOG.values()}
    named = re.compile(rf"\b({'|'.join(map(re.escape, sorted(families - NO_NAMES_OF_FAMILIES)))})", re.I)
    layers = [path for path in source_files() if path.parent == MODELS.with_name("layers")]
    assert len(layers) > 20 and not lines_that_match(named, layers)


def test_functions_fit_a_screen():
    too_long = [
        f"{shown(path)}:{node.lineno} {node.name}: {node.end_lineno - node.lineno} lines"
        for path in source_files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno is not None
        and node.end_lineno - node.lineno > MAX_FUNCTION_LINES
    ]
    assert not too_long


def test_every_source_file_says_what_it_is_for():
    silent = [
        shown(path)
        for path in source_files()
        if path.read_text(encoding="utf-8").strip()
        and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent, "module docstring missing"


def test_no_drawer_without_a_noun():
    parts = {part for path in repository_files() for part in path.relative_to(ROOT).parts}
    assert not [part for part in parts if NAMELESS.match(part)]


def test_no_large_file():
    def limit(path: Path) -> int:
        is_weights = path.suffix == ".safetensors" and "trained" in path.parts
        return MAX_WEIGHTS_BYTES if is_weights else MAX_FILE_BYTES

    assert not [shown(path) for path in repository_files() if path.stat().st_size > limit(path)]


def test_the_two_commands_of_the_readme():
    """.ci/run takes them from README.md by position; this keeps them where it looks."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 2
    assert all(block.count("\n") == 1 for block in blocks), "each is one line"
    assert blocks[0].startswith("pip install ") and "inferplane chat --prompt" in blocks[0]
    assert blocks[1] == "pip install tox && tox\n"
