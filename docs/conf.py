"""Sphinx configuration: `make site` builds the site from the repository's Markdown.

The source folder is the repository's root, so that pages may link to results, examples and code.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from docs.names import unknown_names

project = "Slipstream"
extensions = ["myst_parser"]
include_patterns = ["docs/**", "benchmarks/results/*.md", "examples/**", "*.md"]
root_doc = "docs/index"
html_theme = "furo"
html_title = "Slipstream"
html_extra_path = ["site"]
html_css_files = ["../tables.css"]
html_show_copyright = False
html_show_sphinx = False
myst_heading_anchors = 4
pygments_style = "friendly"

_CHANGELOG = "CHANGELOG"
"""Not checked for unknown names: it names what was removed."""
_GROUPS = {
    "Tutorials": "docs/tutorials/*",
    "How to": "docs/how-to/*",
    "Reference": "docs/reference/*",
    "Explanation": "docs/explanation/*",
    "Measurements": "benchmarks/results/*",
    "Examples": "examples/**",
    "The project": "*",
}
"""The site's navigation: caption and pages."""
_log = logging.getLogger(__name__)


def setup(app: Sphinx) -> None:
    """Register `_read` for each page."""
    app.connect("source-read", _read)


def _read(_: Sphinx, page: str, source: list[str]) -> None:
    if page != _CHANGELOG:
        for name in unknown_names(source[0]):
            _log.warning("%s: no flag, setting, metric or link is named %s", page, name)
    if page == root_doc:
        for caption, pages in _GROUPS.items():
            source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n/{pages}\n```\n"
