"""From what a user writes as MODEL to files on this machine.

A MODEL is a folder, a GGUF file, a Hugging Face id, or nothing, which means the demo model.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Never

from inferplane.models.errors import ModelLoadError

DEMO = "demo"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Files that can run code when they are loaded, so they never are."""


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine."""

    name: str
    """As the user wrote it; ``demo`` where nothing was written."""
    kind: Literal["folder", "gguf"]
    path: Path
    """The folder with ``config.json``, or the GGUF file."""


def resolve_model(
    model: str | None,
    *,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    progress: bool = True,
    fetchers: Mapping[str, str] | None = None,
) -> ModelSource:
    """Finds a model, fetching it first where it is a Hugging Face id, the demo model or a URI, and not here yet.

    ``fetchers`` are plugins' ``"module:function"`` by URI scheme; ``revision`` is a branch, tag or commit of a Hugging
    Face id; ``download_dir`` replaces the cache of whichever is fetched; ``progress`` shows bars on stderr. Raises
    `ModelLoadError` that says what was looked for and what to do.
    """
    if model is None or model == DEMO:
        from inferplane.models.demo import demo_gguf

        return ModelSource(DEMO, "gguf", demo_gguf(download_dir, progress=progress))
    if not model.strip() or "\0" in model:
        raise ModelLoadError(f"model {model!r} is no name; give a folder, a GGUF file or a Hugging Face id")
    if "://" in model:
        return _fetched(model, revision, progress, fetchers or {})
    path = Path(model).expanduser()
    if path.exists():
        if revision is not None:
            raise ModelLoadError(
                f"model {model!r} is on this machine, so revision {revision!r} means nothing; leave it out, or give a "
                "Hugging Face id"
            )
        return _in_folder(model, path) if path.is_dir() else _in_file(model, path)
    if not _HUB_ID.fullmatch(model) or path.suffix in (".gguf", ".safetensors", *PICKLE_SUFFIXES):
        _no_such_path(model, path)
    from inferplane.models.hub import snapshot

    try:
        return _in_folder(
            model, snapshot(model, revision=revision, cache_dir=download_dir, progress=progress)
        )
    except ModelLoadError as error:
        raise ModelLoadError(f"{error}{_near_misses(path)}") from error.__cause__


def _fetched(uri: str, revision: str | None, progress: bool, fetchers: Mapping[str, str]) -> ModelSource:
    from inferplane.plugins.target import import_target

    scheme = uri.partition("://")[0]
    if scheme not in fetchers:
        known = ", ".join(sorted(fetchers)) or "none"
        raise ModelLoadError(
            f"model {uri!r}: no installed plugin fetches from {scheme}://; installed schemes: {known}"
        )
    fetch = import_target(fetchers[scheme], f"the fetcher of {scheme}://")
    path = fetch(uri, revision=revision, progress=progress)
    if not isinstance(path, Path) or not path.exists():
        raise ModelLoadError(
            f"model {uri!r}: its fetcher {fetchers[scheme]} returned {path!r}, which is not there"
        )
    return _in_folder(uri, path) if path.is_dir() else _in_file(uri, path)


def _in_folder(name: str, folder: Path) -> ModelSource:
    if (folder / "config.json").is_file():
        return ModelSource(name, "folder", folder)
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return ModelSource(name, "gguf", files[0])
    if files:
        raise ModelLoadError(f"{folder}: holds several GGUF files ({_some(files)}): name one of them")
    pickles = [file for file in sorted(folder.iterdir()) if file.suffix in PICKLE_SUFFIXES]
    if pickles:
        _refuse_pickle(pickles[0])
    raise ModelLoadError(f"{folder}: is no model: it has neither a config.json nor a .gguf file")


def _in_file(name: str, file: Path) -> ModelSource:
    if not file.is_file():
        raise ModelLoadError(f"{file}: is neither a folder nor a file")
    if file.suffix in PICKLE_SUFFIXES:
        _refuse_pickle(file)
    if file.suffix == ".gguf" or _starts_as_gguf(file):
        return ModelSource(name, "gguf", file)
    if file.suffix == ".safetensors" or file.name == "config.json":
        raise ModelLoadError(f"{file}: is one file of a model: give the folder, {file.parent}")
    raise ModelLoadError(f"{file}: is no GGUF file, and a model in another form is a folder with config.json")


def _starts_as_gguf(file: Path) -> bool:
    """Files of some caches have no suffix."""
    try:
        with file.open("rb") as opened:
            return opened.read(4) == b"GGUF"
    except OSError as error:
        raise ModelLoadError(f"{file}: cannot be read: {error.strerror}") from error


def _refuse_pickle(file: Path) -> Never:
    raise ModelLoadError(
        f"{file}: is a pickle, which can run code when it is loaded; only safetensors and GGUF are read: "
        "convert it with save_pretrained(safe_serialization=True) where you trust it"
    )


def _no_such_path(model: str, path: Path) -> Never:
    raise ModelLoadError(f"model {model!r}: there is no such file or folder{_near_misses(path)}")


def _near_misses(path: Path) -> str:
    """What is there under a similar name, for typing errors."""
    folder = path.parent
    if not folder.is_dir():
        existing = next((parent for parent in path.parents if parent.is_dir()), None)
        return f" ({folder} does not exist; {existing} does)" if existing and path.is_absolute() else ""
    try:
        names = [entry.name for entry in folder.iterdir()] + ([DEMO] if folder == Path() else [])
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(str(folder / name) for name in close)}?" if close else ""


def _some(files: list[Path]) -> str:
    names = [file.name for file in files[:4]]
    return ", ".join(names) + (", …" if len(files) > len(names) else "")
