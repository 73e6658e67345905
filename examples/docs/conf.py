"""The site: `python -m sphinx -W -b html examples/docs build/site`; with `-t quick` in a minute.

Quick, no tutorial is executed. Nothing is fetched from a network, by the build or by the pages.
"""

from __future__ import annotations

import sys
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import making  # noqa: E402

project = "pyrofl"
author = "the authors of pyrofl"
release = version = installed("pyrofl")
quick = globals()["tags"].has("quick")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["making", "gallery", "_static"]
exclude_patterns += [f"made/{n}.md" for n in ("methods_table", "gallery_entries", "tutorials_list")]
html_theme = "furo"
html_title = "pyrofl"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_copyright = False
html_math_renderer = "mathml"
html_theme_options = {
    "source_view_link": "",
    "light_css_variables": {"color-brand-primary": "#00548a", "color-brand-content": "#00548a"},
    "dark_css_variables": {"color-brand-primary": "#6fc0f0", "color-brand-content": "#6fc0f0"},
}
pygments_style, pygments_dark_style = "friendly", "github-dark"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "attrs_inline"]
myst_heading_anchors = 4
nb_execution_mode = "off" if quick else "cache"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True

default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_ivar = napoleon_use_rtype = True
nitpicky = True
nitpick_ignore_regex = [(r"py:(class|exc|obj|func|meth|attr)", r".*")]  # of other libraries
suppress_warnings = ["mystnb.unknown_mime_type", "misc.highlighting_failure"]


def setup(app: Any) -> dict[str, bool]:
    """Make the pages that come from the code, lead links to them, and let formulas be MathML."""
    app.connect("config-inited", lambda app, config: making.make(HERE))
    app.connect("source-read", lambda app, page, source: making.of_site(source))
    app.connect("autodoc-process-docstring", making.plain_signs, priority=400)
    app.add_html_math_renderer("mathml", (making.inline, None), (making.displayed, None))
    return {"parallel_read_safe": True}
