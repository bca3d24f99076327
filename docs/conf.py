"""The site: the repository's own pages, by `make docs`.

Pages stay where they are, so that their links also work on the repository's host. The sidebar is read from README.md:
its sections and the rows of its table "More", each with the pages that it links to.
"""

import re
import shutil
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\(([^)#:]+)\.md[)#]")

project = "moereplay"
author = copyright = "The moereplay authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "studies/**.md", "contrib/*/README.md", "tracegen/miniature/README.md"]
exclude_patterns = [".*", "runs", "build", "dist"]

# Every link to a page, a heading or a file is checked: `make docs` turns warnings into errors.
nitpicky = True
myst_heading_anchors = 4

html_theme = "furo"
html_title = "moereplay"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sphinx = False
html_use_index = False
html_domain_indices = False

default_role = "code"
autodoc_member_order = "bysource"
nitpick_ignore_regex = [("py:.*", ".*")]  # types of other packages: their pages are elsewhere
autodoc_default_options = {"members": True, "undoc-members": True, "exclude-members": "model_config, later, refused_as"}


def sidebar() -> str:
    """Return hidden toctrees of README.md: a page is in the first row that links to it, else in the first section."""
    parts = re.split(r"(?m)^(?=## |\| [a-z][^|]*\| \[)", (ROOT / "README.md").read_text("utf-8"))
    seen = {page for part in parts if part.startswith("|") for page in LINK.findall(part)}
    trees = []
    for part in parts:
        pages = [page for page in dict.fromkeys(LINK.findall(part)) if part.startswith("|") or page not in seen]
        seen.update(pages)
        caption = re.match(r"(?:## |\| )([^\n|]+)", part)
        if pages and caption:
            heading = caption[1].strip().capitalize()
            trees.append("\n".join(("```{toctree}", ":hidden:", f":caption: {heading}", "", *pages, "```")))
    return "\n\n".join(trees)


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Append what only the site needs to the pages that others belong to."""
    if page == "README":
        source[0] += "\n\n" + sidebar()
    if page == "studies/README":
        source[0] += "\n\n```{toctree}\n:hidden:\n:glob:\n\npages/*\n```"


def add_index(app: Sphinx, failed: Exception | None) -> None:
    """Copy the home page to where a server looks for it."""
    if not failed:
        shutil.copy(app.outdir / "README.html", app.outdir / "index.html")


def without_fields(app: Sphinx, what: str, name: str, thing: object, *_: object) -> tuple[str, None] | None:
    """Leave out the signature of a pydantic model, which repeats its fields."""
    return ("", None) if hasattr(thing, "model_fields") else None


def setup(app: Sphinx) -> None:
    """Connect them."""
    app.connect("autodoc-process-signature", without_fields)
    app.connect("source-read", add_contents)
    app.connect("build-finished", add_index)
