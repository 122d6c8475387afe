"""Sphinx settings. `tox -e docs` builds with every warning an error, and installs neither torch nor transformers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "InferPlane"
author = "The InferPlane authors"
project_copyright = "The InferPlane authors, Apache-2.0"

extensions = ["myst_parser", "generated_reference"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "adr/template.md"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nitpicky = True

html_theme = "furo"
html_title = "InferPlane"
