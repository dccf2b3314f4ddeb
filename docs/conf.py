"""Sphinx."""

project = "lightning_fp8_rocm"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
exclude_patterns = ["_build"]
autodoc_typehints = "none"
myst_heading_anchors = 3
suppress_warnings = ["myst.header", "ref.python"]
