"""Text that others wrote, made fit to keep and to show: one rule for headers, terminals, figures, pages and tables.

A model's name in a file is data, and may hold escape sequences of a terminal, marks that reverse the direction of
writing, halves of characters that no encoding has, the formula of a spreadsheet or five million letters.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator

MOST_NAME = 200  #: characters of a name: a model, a revision, a licence
MOST_TEXT = 2_000  #: characters of a source or a note
MOST_NOTES = 1_000
CUT = "..."
#: How spreadsheets recognise a formula, wide forms of East Asian fonts among them.
FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20\t\r]")
#: A number as text, which a table keeps as it is, as it does a dash alone.
NUMBER = re.compile(r"\s*[+-]?(?:\d[\d,_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\s*%?\s*|-|\s*[+-]?(?:inf|nan)")
#: Characters by which Markdown and HTML begin something.
MARKUP = re.compile(r"([\\`*_\[\]|!#~$])")


def escaped(text: str) -> str:
    """Return the text with every character that does not print as its escape in Python, for example `\\x1b`."""
    return text if text.isprintable() else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def escaped_lines(text: str) -> str:
    """Return the text like `escaped`, with its line breaks."""
    return "\n".join(map(escaped, text.split("\n")))


def escaped_document(document: Any) -> Any:
    """Return a document of lists and tables with every text and key in it like `escaped`."""
    if isinstance(document, dict):
        return {escaped(key): escaped_document(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [escaped_document(value) for value in document]
    return escaped(document) if isinstance(document, str) else document


def shown(value: object, most: int = 60) -> str:
    """An untrusted value in an error: one line, of so many characters."""
    try:
        return escaped(str(value)[:most])
    except (ValueError, RecursionError):  # an integer of thousands of digits, lists within lists
        return f"a {type(value).__name__} too long to show"


def settled(text: str, most: int = MOST_TEXT) -> str:
    """Return the text as a header keeps it: one printable line of at most `most` characters, valid UTF-8.

    Line breaks and tabs become spaces, other characters that do not print become escapes. Settled text stays as it is.
    """
    head = text[: most + 1]  # of millions of characters only the first are looked at
    line = head if head.isprintable() else escaped(re.sub(r"[ \t\r\n\f\v]+", " ", head).strip(" "))
    return line if len(line) <= most else line[: most - len(CUT)] + CUT


def changed(text: str, most: int = MOST_TEXT) -> str:
    """Return what `settled` does to a text, in words; empty if nothing."""
    told = []
    if not text[: most + 1].isprintable():
        told.append("it holds control characters")
    if len(text) > most:
        told.append(f"it has {len(text):,} characters, more than {most:,}")
    return " and ".join(told)


def in_csv(text: str) -> str:
    """Return a cell of CSV that no spreadsheet takes for a formula: such a text gets an apostrophe. Numbers stay."""
    shown = escaped(text)
    return f"'{shown}" if FORMULA.match(text) and not NUMBER.fullmatch(text) else shown


def in_markdown(text: str) -> str:
    """Return the text for a cell or a line of Markdown, in which it can begin no markup, link or HTML."""
    return MARKUP.sub(r"\\\1", escaped(text)).replace("&", "&amp;").replace("<", "&lt;")


def _notes(notes: tuple[str, ...]) -> tuple[str, ...]:
    left_out = len(notes) - MOST_NOTES + 1
    return notes if left_out <= 1 else (*notes[: MOST_NOTES - 1], f"{left_out:,} more notes")


Name = Annotated[str, AfterValidator(lambda text: settled(text, MOST_NAME))]
Text = Annotated[str, AfterValidator(settled)]
Notes = Annotated[tuple[Text, ...], AfterValidator(_notes)]
