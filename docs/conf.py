"""Sphinx: ``make docs``. Everything is built from this repository; nothing is fetched."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # autodoc imports DeepSpeed, which would look for one

project = "lightning-zeroplus"
author = "The lightning-zeroplus authors"
release = importlib.metadata.version("lightning-zeroplus")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = project
html_copy_source = False
html_show_copyright = False

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say what an argument is
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # an attribute may be a property, which is documented by itself

# A reference to a name of ours has to lead somewhere on the site.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!lightning_zeroplus\.).*"),
    (r"py:.*", r"lightning_zeroplus\.engine\.(accumulation|compile)\..*"),  # types of the engine's attributes
]


def _drop_missing(app: Any, page: str, source: list[str]) -> None:
    # Sphinx warns of a pattern that matches nothing; a page that is still to be written is no mistake.
    if page == "index":
        exists = {path.stem for path in Path(app.srcdir).glob("*.md")}
        source[0] = re.sub(
            r"^(\w+)\*\n", lambda found: found[1] + "\n" if found[1] in exists else "", source[0], flags=re.M
        )


def setup(app: Any) -> None:
    """Connect what is defined here."""
    app.connect("source-read", _drop_missing)
