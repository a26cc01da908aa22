"""Sphinx configuration."""

from __future__ import annotations

import shardwise

project = "shardwise"
author = "the shardwise authors"
release = shardwise.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "pydata_sphinx_theme"
html_title = "shardwise"
html_theme_options = {"show_toc_level": 2}
