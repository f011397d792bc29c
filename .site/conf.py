"""Sphinx's settings for the site of all guides: `make site`."""

import re
from typing import Any

project = "trl_tpu"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["README.md", "examples/**.md", "tests/benchmarks/runs.md"]
html_theme = "furo"
myst_heading_anchors = 4


def setup(app: Any) -> None:
    """Put all pages that README links into the contents."""
    app.connect("source-read", _add_contents)


def _add_contents(app: Any, page: str, source: list[str]) -> None:
    if page == root_doc:
        in_order = source[0].partition("## Guides")[2] + source[0]
        pages = dict.fromkeys(re.findall(r"\]\(([^)#:]+\.md)\)", in_order))
        source[0] += "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"
