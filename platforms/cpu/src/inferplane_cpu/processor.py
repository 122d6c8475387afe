"""What the processor calls itself and which products it has instructions for, without asking torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
_FP16_FLAGS = {"avx512_fp16", "amx_fp16", "asimdhp"}
_VECTOR_PATHS = (
    ("amx_tile", "AMX"),
    ("avx512f", "AVX-512"),
    ("avx2", "AVX2"),
    ("sve", "SVE"),
    ("asimd", "NEON"),
)


@dataclass(frozen=True)
class Processor:
    name: str
    flags: frozenset[str]

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Names for a `CapabilitySet`."""
        found = []
        if self.flags & _BF16_FLAGS:
            found.append("bf16_matmul")
        if self.flags & _FP16_FLAGS:
            found.append("fp16_matmul")
        return tuple(found)

    @property
    def vector_path(self) -> str:
        """The widest instructions that libraries will choose at run time."""
        return next((path for flag, path in _VECTOR_PATHS if flag in self.flags), "baseline instructions")


def read_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Processor:
    """The first processor in ``cpuinfo``; what Python knows where there is no such file."""
    fields = _first_processor(cpuinfo)
    name = fields.get("model name") or _name_from_python()
    return Processor(name, frozenset((fields.get("flags") or fields.get("Features") or "").split()))


def _name_from_python() -> str:
    import platform  # slow to import, and not needed where the kernel says more

    return platform.processor() or platform.machine() or "unknown processor"


def _first_processor(cpuinfo: Path) -> dict[str, str]:
    fields: dict[str, str] = {}
    try:
        with cpuinfo.open() as lines:
            for (
                line
            ) in lines:  # stops early: the kernel takes its time to describe every core of a large machine
                if not line.strip():
                    if fields:
                        break
                    continue
                key, _, value = line.partition(":")
                fields[key.strip()] = value.strip()
    except OSError:
        return {}
    return fields
