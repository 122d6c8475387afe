"""Directives that write pages: `hooks`, `command-line`, `environment`, `engine-options`, `support-matrix` and
`format-matrix`."""

from __future__ import annotations

from collections.abc import Callable

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import format_matrix
import reference_text
import support_matrix

WRITERS: dict[str, Callable[[], str]] = {
    "hooks": reference_text.hooks_markdown,
    "command-line": reference_text.command_line_markdown,
    "environment": reference_text.environment_markdown,
    "engine-options": reference_text.engine_options_markdown,
    "support-matrix": support_matrix.support_matrix_markdown,
    "format-matrix": format_matrix.format_matrix_markdown,
}


class _Generated(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(WRITERS[self.name](), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    for name in WRITERS:
        app.add_directive(name, _Generated)
    return {"parallel_read_safe": True}
