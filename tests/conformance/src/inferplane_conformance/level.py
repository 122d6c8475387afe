"""The levels of the kit, in the order in which a platform passes them."""

from __future__ import annotations

LEVELS = {
    0: "packaging",
    1: "contract",
    2: "ops",
    3: "components",
    4: "engine",
    5: "serving",
}
"""Names by number."""


def level_of(file_name: str) -> int:
    """Of a test file, which is called ``level_<number>_<subject>.py``."""
    return int(file_name.split("_")[1])
