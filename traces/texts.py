"""Text for people: suggestions for misspelt names, numbers with their units, and untrusted text made safe to show.

A model's name in a file is data. It may hold escape sequences of a terminal, marks that reverse the direction of
writing, unpaired surrogates, the formula of a spreadsheet or five million letters. Standard library only: `--help` and
policies use this file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches
from math import floor, isfinite, log10
from shlex import quote
from typing import Any

# -- Names as users type them


def whole(text: str) -> int | None:
    """Return a whole number of at most 18 digits, which fits int64; None for any other text."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like a misspelt one, ignoring case; None if none is similar."""
    by_spelling = {_folded(each): each for each in known}
    near = get_close_matches(_folded(name), by_spelling, n=1)
    return by_spelling[near[0]] if near else None


def hint(name: str, known: Iterable[str], otherwise: str = "choose from") -> str:
    """Return `did you mean X?`, or `otherwise` and all known names, the most similar first."""
    known = list(known)
    near = nearest(name, known)
    if near:
        return f"did you mean {near}?"
    likeness = {each: SequenceMatcher(None, _folded(name), _folded(each)).ratio() for each in known}
    return f"{otherwise} {', '.join(sorted(known, key=lambda each: -likeness[each]))}"


def meant(name: str, known: Iterable[str]) -> str:
    """Return `did you mean X? ` for a misspelt name; nothing for a known one, or if none is similar."""
    known = list(known)
    near = None if name in known else nearest(name, known)
    return f"did you mean {near}? " if near else ""


def typed(path: object) -> str:
    """Return a path as a shell and the command line read it: quoted, and not as an option."""
    text = str(path)
    return quote(f"./{text}" if text.startswith("-") else text)


def _folded(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def counted(many: int, what: str) -> str:
    """Return a number with its noun: 1 token, 2,000 tokens."""
    return f"{many:,} {what}{'' if many == 1 else 's'}"


def times_as_fast(ratio: float, many: int = 4) -> str:
    """Return a ratio of speeds in words: `as fast`, `1.2 times as fast`."""
    times = digits(ratio, many)
    return "as fast" if times == "1" else f"{times} times as fast"


def between(least: str, most: str) -> str:
    """Return a range as printed, or its one value where both ends print alike: `1.2 to 1.5`, `1.2`."""
    return least if least == most else f"{least} to {most}"


# -- Numbers with two to four digits and no exponents; files, `--csv` and `--json` keep every digit

SMALLEST = 0.01  #: percent or points; smaller values print as `<0.01`
SIZES = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))


def percent(share: float, signed: bool = False) -> str:
    """Return a share in percent: `230%`, `12%`, `4.3%`, `0.41%`, and `<0.01%` for smaller ones.

    With `signed` a gain begins with `+`, and a change of less than 0.005 % is `0%`.
    """
    return _hundredths(share, "%", signed)


def points(share: float) -> str:
    """Return a difference of two shares in percentage points: `12 points`, `0.05 points`."""
    return _hundredths(share, " points", False)


def size(count: float) -> str:
    """Return bytes in decimal units with three digits: `28 B`, `1.5 MB`, `32.4 GB`."""
    for factor, unit in SIZES:
        if abs(count) >= 0.9995 * factor:  # rounds up to the next unit
            return f"{digits(count / factor, 3)} {unit}"
    return f"{digits(count, 2)} {SIZES[-1][1]}"


def sold(count: float) -> str:
    """Return the memory of a device as it is sold: 24 * 2**30 bytes are `24 GB`."""
    return f"{digits(count / 2**30, 4)} GB"


def rate(per_second: float) -> str:
    """Return bytes per second: `4.2 GB/s`."""
    return f"{size(per_second)}/s"


def digits(value: float, many: int) -> str:
    """Return a number with `many` significant digits, or all digits before the point, without an exponent."""
    if not value or not isfinite(value):
        return "0" if not value else str(value)
    value = float(f"{value:.{many - 1}e}")  # 9.99 becomes 10 before its digits are counted
    behind = max(0, many - 1 - floor(log10(abs(value))))
    text = f"{value:,.{behind}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _hundredths(share: float, unit: str, signed: bool) -> str:
    value = 100 * share
    if not signed and 0 < abs(value) < SMALLEST:
        return f"{'<' if value > 0 else '>-'}{SMALLEST}{unit}"
    text = f"{abs(value):,.0f}" if abs(value) >= 9.95 else digits(float(f"{abs(value):.2f}"), 2)
    sign = "-" if value < 0 else "+" if signed else ""
    return f"{sign if text != '0' else ''}{text}{unit}"


# -- Untrusted text: one rule for headers, terminals, figures, pages and tables

MOST_NAME = 200  #: characters of a name: a model, a revision, a licence
MOST_TEXT = 2_000  #: characters of a source or a note
CUT = "..."
#: How spreadsheets recognise a formula, wide forms of East Asian fonts included.
FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20\t\r]")
#: A number as text, or a lone dash: a table keeps them unquoted.
NUMBER = re.compile(r"\s*[+-]?(?:\d[\d,_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\s*%?\s*|-|\s*[+-]?(?:inf|nan)")
#: Characters that begin markup in Markdown and HTML.
MARKUP = re.compile(r"([\\`*_\[\]|!#~$])")
LONGEST_ADDRESS = 2000  #: characters searched for passwords before a text is cut: a cut could hide a password's end
#: User and password before a host, as far as the last @ if the password has a slash; secrets in a query.
PASSWORD = re.compile(r"(?<=://)(?:[^\s/?#@:]*:(?!\d+(?:/|$))\S*@|[^\s/?#@]*@)")
SECRET = re.compile(
    r"([?&#][^\s=&#]*(?:sig|token|key|secret|passw|credential|auth)[^\s=&#]*=)[^\s&#'\"]+", re.IGNORECASE
)


def without_password(text: str) -> str:
    """Return the text with addresses that have no user, password, token or signature."""
    return SECRET.sub(r"\1***", PASSWORD.sub("***@", text)) if "://" in text else text


def escaped(text: str) -> str:
    """Return the text as it may be shown: characters that do not print as escapes (`\\x1b`), and no passwords."""
    text = without_password(text)
    return text if text.isprintable() else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def escaped_lines(text: str) -> str:
    """Return the text like `escaped`, but keep its line breaks."""
    return "\n".join(map(escaped, text.split("\n")))


def escaped_document(document: Any) -> Any:
    """Return a document of lists and tables, with every text and key like `escaped`."""
    if isinstance(document, dict):
        return {escaped(key): escaped_document(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [escaped_document(value) for value in document]
    return escaped(document) if isinstance(document, str) else document


def shown(value: object, most: int = 60) -> str:
    """Return an untrusted value for an error message: one line of at most `most` characters before escaping."""
    try:
        return escaped(without_password(str(value)[: most + LONGEST_ADDRESS])[:most])
    except (ValueError, RecursionError):  # an integer of thousands of digits, lists within lists
        return f"a {type(value).__name__} too long to show"


def settled(text: str, most: int = MOST_TEXT) -> str:
    """Return the text as a header keeps it: one printable line of at most `most` characters, valid UTF-8.

    Line breaks and tabs become spaces, other characters that do not print become escapes. The function is idempotent.
    """
    head = text[: most + 1]  # the rest of a text of millions of characters is never looked at
    line = without_password(head) if head.isprintable() else escaped(re.sub(r"[ \t\r\n\f\v]+", " ", head).strip(" "))
    return line if len(line) <= most else line[: most - len(CUT)] + CUT


def changed(text: str, most: int = MOST_TEXT) -> str:
    """Return in words why `settled` changes a text; empty if it does not."""
    reasons = []
    if not text[: most + 1].isprintable():
        reasons.append("it contains control characters")
    if len(text) > most:
        reasons.append(f"it has {len(text):,} characters, more than {most:,}")
    return " and ".join(reasons)


def in_csv(text: str) -> str:
    """Return a CSV cell that no spreadsheet takes for a formula: such a text gets an apostrophe. Numbers stay."""
    cell = escaped(text)
    return f"'{cell}" if FORMULA.match(text) and not NUMBER.fullmatch(text) else cell


LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {mark: f"\\{mark}" for mark in "&%$#_{}"} | {mark: f"${mark}$" for mark in "<>|"}


def in_latex(text: str) -> str:
    """Return the text for a cell of a LaTeX table, with every command disabled."""
    return escaped(text).translate(str.maketrans(LATEX))


def in_markdown(text: str) -> str:
    """Return the text for a cell or a line of Markdown, with markup, links and HTML disabled."""
    return MARKUP.sub(r"\\\1", escaped(text)).replace("&", "&amp;").replace("<", "&lt;")
