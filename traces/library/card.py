"""The card of a library, README.md: what a hub of data sets shows of it."""

from __future__ import annotations

import re

from moereplay.traces.library.index import Entry, Index
from moereplay.traces.texts import in_markdown

PLAIN = re.compile(r"[A-Za-z0-9.+-]+")  #: a licence that YAML reads as a text
TAGS = ("mixture-of-experts", "expert-routing", "moereplay")
COLUMNS = ("name", "model", "licence", "requests", "tokens", "MB", "holds", "source", "digest")


def card(index: Index) -> str:
    """Markdown, with the header in YAML by which hubs file a data set."""
    licences = sorted({each.licence for each in index.traces})
    licence = licences[0].lower() if len(licences) == 1 and PLAIN.fullmatch(licences[0]) else "other"
    head = ["---", f"license: {licence}", "tags:", *(f"- {tag}" for tag in TAGS), "---"]
    rows = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|", *map(_row, index.traces)]
    return "\n".join([*head, "", "# Routing traces of Mixture-of-Experts models", "", USE, "", *rows, "", PROMPTS, ""])


USE = """Which experts each token ran at each layer, in the format of moereplay:

    moereplay traces list THIS_LIBRARY
    moereplay traces get NAME --from THIS_LIBRARY --out NAME.zarr
    moereplay replay NAME.zarr --capacity 25% --eviction lru,least_stale

`traces.json` has the sha256 of every file; `get` holds them to it."""
PROMPTS = "Prompts are not published; `prompts_sha256` in `traces.json` is a hash of their token ids."


def _row(entry: Entry) -> str:
    size = f"{entry.bytes / 1e6:,.1f}"
    cells = (entry.name, entry.model, entry.licence, f"{entry.requests:,}", f"{entry.tokens:,}", size)
    cells += (", ".join(entry.capabilities), entry.source, entry.digest[:12])
    return f"| {' | '.join(map(in_markdown, cells))} |"
