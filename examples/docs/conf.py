"""The site: `python -m sphinx -W -b html examples/docs build/site`; `-t quick` in two minutes.

Quick, no tutorial is executed. Nothing is fetched from a network, by the build or by the pages.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version as installed
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sphinx.errors import ConfigError

HERE = Path(__file__).parent
sys.path[:0] = map(str, (HERE, HERE.parent))

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
needed = [*extensions, "pydata_sphinx_theme", "jupytext", "formulae"]
if absent := [name for name in needed if find_spec(name) is None]:
    raise ConfigError(f"not installed: {', '.join(absent)}; run pip install -e '.[docs]'")

import making  # noqa: E402

project = "pyrofl"
author = "the authors of pyrofl"
release = version = installed("pyrofl")
quick = globals()["tags"].has("quick")

templates_path = ["making/templates"]
exclude_patterns = ["making", "gallery", "_static"]
exclude_patterns += [f"made/{n}.md" for n in ("methods_table", "gallery_cards", "tutorials_cards")]
html_theme = "pydata_sphinx_theme"
html_title = f"pyrofl {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/logo.svg"
# Sites of several versions lie in folders beside each other: build/site/0.1.0, build/site/0.2.0.
html_context = {"versions": json.loads((HERE / "_static" / "versions.json").read_text())}
if all(one["version"] != release for one in html_context["versions"]):
    raise ConfigError(f"examples/docs/_static/versions.json lacks version {release}")
html_sourcelink_suffix = ""  # tutorials are downloaded as notebooks
html_show_copyright = False
html_show_sphinx = False
html_math_renderer = "mathml"
wide = ("index", "start", "gallery", "tutorials", "all_methods", "calibration")
html_sidebars: dict[str, list[str]] = {page: [] for page in wide}
toc_object_entries_show_parents = "hide"
html_theme_options = {
    "logo": {"text": "pyrofl", "image_light": "_static/logo.svg", "image_dark": "_static/logo.svg"},
    "navbar_end": ["versions", "theme-switcher", "navbar-icon-links"],
    "show_prev_next": True,
    "collapse_navigation": True,
    "navigation_depth": 3,
    "header_links_before_dropdown": 8,
    "secondary_sidebar_items": {"**": ["page-toc", "page-source"], "index": []},
    "pygments_dark_style": "github-dark-high-contrast",
    "footer_start": [],
    "footer_end": [],
}

copybutton_selector = "div[class*='highlight-']:not(.highlight-text) > div.highlight pre"
copybutton_prompt_text, copybutton_prompt_is_regexp = r">>> |\.\.\. ", True

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "attrs_inline"]
myst_heading_anchors = 4
nb_execution_mode = "off" if quick else "cache"
nb_execution_timeout = 1800  # seconds of a cell, as in the course: other work may slow a machine
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # would be fetched from a network
os.environ["TQDM_DISABLE"] = "1"  # progress bars of executed pages would be such widgets

default_role = "code"
autosummary_context = {"summaries": making.summaries()}
python_use_unqualified_type_names = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_ivar = napoleon_use_rtype = True
nitpicky = True
nitpick_ignore_regex = [(r"py:(class|exc|obj|func|meth|attr)", r".*")]  # of other libraries
suppress_warnings = ["mystnb.unknown_mime_type", "misc.highlighting_failure"]
suppress_warnings += ["toc.multiple_toc_parents"]  # classes of pyrofl that modules list, too


def setup(app: Any) -> dict[str, bool]:
    """Make the pages that come from the code, lead links to them, and let formulas be MathML."""
    app.connect("config-inited", lambda app, config: making.make(HERE))
    app.connect("source-read", lambda app, page, source: making.of_site(source))
    app.connect("autodoc-process-docstring", making.plain_signs, priority=400)
    app.connect("autodoc-process-signature", making.by_name)
    app.connect("object-description-transform", making.plain_types, priority=600)
    app.connect("html-page-context", making.accessible, priority=900)
    app.add_html_math_renderer("mathml", (making.inline, None), (making.displayed, None))
    return {"parallel_read_safe": True}
