"""A page as the standard library's parser reads it: elements, headings, ids, scripts and whatever names an address."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "link", "img", "br", "input", "hr", "path", "line"}
ADDRESSES = ("src", "href", "action", "data", "poster", "srcset", "formaction")


class Page(HTMLParser):
    """The content of a page; `problems` are unclosed tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.headings: list[int] = []
        self.tables: list[list[dict[str, Any]]] = []  #: attributes of each table's heads
        self.captions = 0
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.scripts: list[tuple[dict[str, Any], str]] = []
        self.images: list[dict[str, Any]] = []
        self.words: list[str] = []
        self.problems: list[str] = []
        self._open: list[str] = []
        self.policy = ""
        self.feed(text)
        self.close()
        self.problems += self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found: dict[str, Any] = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        self.addresses += [found[name] or "" for name in ADDRESSES if name in found]
        self.handlers += [name for name in found if name.startswith("on")]
        self._noted(tag, found)
        if tag not in VOID:
            self._open.append(tag)

    def _noted(self, tag: str, found: dict[str, Any]) -> None:
        if tag[0] == "h" and tag[1:].isdecimal():
            self.headings.append(int(tag[1:]))
        elif tag == "table":
            self.tables.append([])
        elif tag == "th":
            self.tables[-1].append(found)
        elif tag == "caption":
            self.captions += 1
        elif tag == "script":
            self.scripts.append((found, ""))
        elif tag == "img":
            self.images.append(found)
        elif found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if not self._open or self._open.pop() != tag:
            self.problems.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif "style" not in self._open:
            self.words.append(data)

    @property
    def text(self) -> str:
        """Return the visible text."""
        return " ".join(" ".join(self.words).split())

    def script(self, name: str) -> Any:
        """The JSON of the script with that id."""
        return next(json.loads(text) for attributes, text in self.scripts if attributes.get("id") == name)

    @property
    def code(self) -> list[str]:
        """The scripts that run."""
        return [text for attributes, text in self.scripts if attributes.get("type") != "application/json"]


def first_screen(html: str) -> str:
    """Return the words of a page of `report` down to its ranking, a line each, as docs/figures/report.png has them."""
    words = [" ".join(each.split()) for each in Page(html).words if each.strip()]
    headings = [at for at, each in enumerate(words) if each == "Ranking"]
    return "\n".join(words[: headings[1]]) + "\n"


if __name__ == "__main__":
    print(first_screen(Path(sys.argv[1]).read_text("utf-8")), end="")
