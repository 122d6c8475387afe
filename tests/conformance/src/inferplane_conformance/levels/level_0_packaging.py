"""Level 0: the distribution, its light entry point, and its source."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from inferplane.plugins import ENTRY_POINT_GROUP
from inferplane_conformance.source.rules import foreign_imports, monkeypatches
from inferplane_conformance.source.shared_lines import MAX_SHARE, shared_lines
from inferplane_conformance.subject import Subject

pytestmark = pytest.mark.without_device
MAX_IMPORT_S = 0.25
"""Processor time of importing the plugin's module, beyond that of `inferplane.api`."""
HEAVY = ("torch", "transformers", "triton", "jax", "tensorflow")

# Imports the entry point's module where no heavy library can be imported, and says how long that took.
IMPORT_ON_A_BARE_HOST = """
import sys, time
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {heavy!r}:
            raise ImportError(f"{{name}} was imported")
sys.meta_path.insert(0, Refuse())
import inferplane.api
started = time.process_time()
import {module}
print(time.process_time() - started)
"""

# Probes every platform with every library there is, and says which heavy ones that has loaded.
PROBE = """
import json, sys
from inferplane.plugins import load_plugins
load_plugins(quiet=True).probe()
print(json.dumps([name for name in {heavy!r} if name in sys.modules]))
"""


@pytest.fixture
def module(subject: Subject) -> str:
    if subject.entry_point is None:
        pytest.skip("the core's own platform has no distribution of its own")
    return subject.entry_point.module


def run(script: str) -> str:
    """The last line that the script prints in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_the_distribution_says_what_it_is(subject: Subject, module: str) -> None:
    distribution = subject.distribution
    assert distribution is not None
    metadata = distribution.metadata
    for field in ("Name", "Version", "Summary", "Requires-Python"):
        assert metadata[field], f"the distribution's metadata has no {field}"
    assert metadata["License-Expression"] or metadata["License"], (
        "the distribution's metadata names no license"
    )
    required = [re.split(r"[^A-Za-z0-9._-]", each)[0].lower() for each in distribution.requires or []]
    assert "inferplane" in required, f"it is written against inferplane, but requires only {required}"


def test_one_name_everywhere(subject: Subject, module: str) -> None:
    record = subject.record
    assert subject.device.platform == record.name == subject.platform.name
    assert record.api is not None
    assert "platform" in record.provides
    names = [entry.name for entry in subject.distribution.entry_points if entry.group == ENTRY_POINT_GROUP]  # type: ignore[union-attr]
    assert record.name in names


def test_the_entry_point_imports_on_a_bare_host(module: str) -> None:
    """No driver, no vendor library, no torch: the module is imported at every start of every command."""
    seconds = min(float(run(IMPORT_ON_A_BARE_HOST.format(module=module, heavy=HEAVY))) for _ in range(3))
    assert seconds <= MAX_IMPORT_S, f"importing {module} takes {seconds:.2f} s of processor time"


def test_probing_initialises_no_device(module: str) -> None:
    """`probe_devices` runs in front ends and before forks: it looks, and does not touch."""
    loaded = json.loads(run(PROBE.format(heavy=HEAVY)))
    assert not loaded, f"probing imports {', '.join(loaded)}"


def test_the_source_changes_nobody_elses_modules(subject: Subject) -> None:
    found = [line for file in subject.source_files for line in monkeypatches(file)]
    assert not found, "monkeypatches:\n" + "\n".join(found)


def test_the_source_imports_the_contract_and_nothing_else_of_the_core(subject: Subject) -> None:
    found = [line for file in subject.source_files for line in foreign_imports(file)]
    assert not found, "a plugin is written against inferplane.api alone:\n" + "\n".join(found)


def test_the_source_is_no_copy_of_the_core(subject: Subject) -> None:
    found = shared_lines(subject.source_files)
    assert found.share <= MAX_SHARE, (
        f"{found.share:.1%} of the lines stand in the core as well:\n" + "\n".join(found.shared)
    )


def test_the_package_is_typed(subject: Subject, module: str) -> None:
    assert isinstance(subject.package, Path)
    assert (subject.package / "py.typed").is_file(), (
        "py.typed is missing, so nobody's type checker reads the types"
    )
