"""Sphinx builds the site of docs/ by this file (``make docs``). Everything that it warns of ends the build."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["TRITON_INTERPRET"] = "1"  # kernels are Python functions then, with their docstrings

from docs import site
from sidelane.version import VERSION

project = "Sidelane"
copyright = "the Sidelane authors. Apache-2.0"
release = version = VERSION

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
html_theme = "furo"
html_title = f"Sidelane {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "static" / "scorer.js")
html_copy_source = False
html_show_sphinx = False
highlight_language = "none"
nitpicky = True

myst_heading_anchors = 4
myst_all_links_external = False

autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_use_ivar = True
napoleon_use_param = False
napoleon_use_rtype = False


def setup(app: Any) -> None:
    app.connect("source-read", lambda _, page, source: source.__setitem__(0, site.as_shown(page, source[0])))
    app.connect("autodoc-process-docstring", site.docstring_as_shown, priority=900)  # behind napoleon
    app.connect("autodoc-process-signature", site.signature_as_shown)
    app.connect("missing-reference", site.found)
