"""Tables of text for a terminal or a pipe. They fit its width, and a number is never wrapped.

What is too wide loses, one after the other until it fits: the columns that do not vary, which move above the table; the
columns that the caller can spare; prose, which is folded; then the row becomes a line of text above its numbers.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from csv import DictWriter
from dataclasses import dataclass
from io import StringIO
from itertools import zip_longest
from textwrap import TextWrapper, fill, wrap
from typing import TYPE_CHECKING, Any

from moereplay.results.metrics import METRICS
from moereplay.traces.texts import SMALLEST, escaped, in_csv, in_markdown

if TYPE_CHECKING:
    from rich.console import Console


WIDTH = 80  #: of what is no terminal, unless COLUMNS says otherwise
GAP = "  "
LONG = 24  #: a text of more characters and several words is prose
VAST = 1e12  #: floats from which on nobody counts commas
TINY = 0.0001  #: floats below which digits say nothing in a column
NARROWEST = 16  #: of a column of prose
HEAD_BREAKS = r" +|(?<=_)(?=\w)"
COMMAND = ": moereplay "  #: before a command that ends a line
KEPT = "\N{NO-BREAK SPACE}"  #: where a line is not to be broken; textwrap breaks at spaces of ASCII alone

Rows = Sequence[Mapping[str, object]]


@dataclass(frozen=True)
class Column:
    """A head and its cells as text."""

    head: str
    cells: tuple[str, ...]
    numeric: bool

    @property
    def width(self) -> int:
        """Of the widest cell, or of the head."""
        return max(map(len, (self.head, *self.cells)))

    @property
    def least(self) -> int:
        """The width to which it may be folded: numbers and short texts stay whole, heads break after spaces and _."""
        if self.prose:
            return NARROWEST
        return max(map(len, (*re.split(HEAD_BREAKS, self.head), *self.cells)), default=0)

    @property
    def prose(self) -> bool:
        """Whether it may be folded."""
        return not self.numeric and any(len(cell) > LONG and " " in cell for cell in self.cells)

    @property
    def constant(self) -> bool:
        """Whether all of several cells are alike."""
        return len(self.cells) > 1 and len(set(self.cells)) == 1

    def padded(self, text: str, width: int) -> str:
        """A text of this column: numbers to the right."""
        return text.rjust(width) if self.numeric else text.ljust(width)


def width_of(stream: object = None) -> int:
    """Columns of the terminal that the stream is, or COLUMNS, or 80."""
    isatty: Callable[[], bool] = getattr(stream or sys.stdout, "isatty", bool)
    columns = shutil.get_terminal_size((WIDTH, 24)).columns if isatty() else _of_environment()
    return max(columns, NARROWEST)


def _of_environment() -> int:
    """COLUMNS, where the user sets it; get_terminal_size would ask the terminal that started a pipe."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else WIDTH


def console(stderr: bool = False) -> Console:
    """The console for progress bars, and for what is printed as it is."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=width_of(stream), highlight=False, markup=False, soft_wrap=True)  # [x] is text


def table(rows: Rows, title: str = "", spare: Sequence[str] = (), width: int = 0, more: str = "--csv") -> str:
    """A column per key of any row; numbers to the right, floats with four significant digits.

    `spare` are the columns that may be left out, first to go first, and `more` the option that prints them; `width` is
    the terminal's unless given.
    """
    width = width or width_of()
    columns = [_column(rows, name) for name in dict.fromkeys(name for row in rows for name in row)]
    above: list[str] = [title] if title else []
    columns, said = _without_constants(columns, width)
    above += [folded(f"all: {'; '.join(said)}", width)] if said else []
    columns, left_out = _spared(columns, spare, width)
    below = [folded(f"more with {more}: {', '.join(left_out)}", width)] if left_out else []
    return "\n".join([*above, *_drawn(columns, width), *below, ""])


def markdown(rows: Rows) -> str:
    """The rows as a Markdown table, of any width."""
    columns = [_column(rows, name) for name in dict.fromkeys(name for row in rows for name in row)]
    lines = [[each.head for each in columns], ["--:" if each.numeric else "---" for each in columns]]
    lines += [[in_markdown(each.cells[at]) for each in columns] for at in range(len(rows))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def csv(rows: Rows) -> str:
    """The rows as CSV, every digit; what is not there is empty. No spreadsheet takes a text for a formula."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    written = StringIO()
    writer = DictWriter(written, names, lineterminator="\n")
    writer.writerow({name: in_csv(name) for name in names})
    for row in rows:
        writer.writerow({name: in_csv(value) if isinstance(value, str) else value for name, value in row.items()})
    return written.getvalue().rstrip("\n")


def folded(text: str, width: int = 0, hanging: str = GAP) -> str:
    """A line as several that fit, unless a word does not; those after the first are indented.

    What is to be pasted stays whole: text in backticks, and a command at the end, which gets a line of its own. ± stays
    with its number.
    """
    width, indented = width or width_of(), " " * (len(text) - len(text.lstrip())) + hanging
    if len(text) <= width:
        return text
    prose, _, typed = text.rpartition(COMMAND)
    if prose:
        return f"{folded(prose + ':', width, hanging)}\n{indented}{COMMAND[2:]}{typed}"
    kept = re.sub("`[^`]*`|± ", lambda span: span[0].replace(" ", KEPT), text)
    lines = fill(kept, width, subsequent_indent=indented, break_long_words=False, break_on_hyphens=False)
    return lines.replace(KEPT, " ")


def definitions(pairs: Sequence[tuple[str, str]], width: int = 0) -> list[str]:
    """Each name with its text beside it, folded below itself; a name is given once for texts that follow it."""
    width, names = width or width_of(), max(len(name) for name, _ in pairs)
    return [line for name, text in pairs for line in _beside(f"{name:{names}}{GAP}", text, width)]


def _beside(name: str, text: str, width: int) -> list[str]:
    room = max(width - len(name), NARROWEST)
    first, *others = lines = folded(text, room, "").splitlines() or [""]
    if max(map(len, lines)) > room:  # what cannot be folded has a line of its own
        return [name.rstrip(), GAP + text]
    return [(name + first).rstrip(), *(" " * len(name) + line for line in others)]


def counted(many: int, what: str) -> str:
    """1 token, 2,000 tokens."""
    return f"{many:,} {what}{'' if many == 1 else 's'}"


def cell(value: object) -> str:
    """A value as text: floats with four significant digits, thousands separated by commas.

    What is vast is 4e+24, and what is too small for a column of numbers is <0.0001.
    """
    if value is None:
        return "-"
    if isinstance(value, float) and abs(value) >= VAST:
        return f"{value:.4g}"
    if isinstance(value, float) and 0 < abs(value) < TINY:
        return f"<{TINY}" if value > 0 else f">-{TINY}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else escaped(str(value))


class Share(float):
    """A share that is shown in percent."""

    def __str__(self) -> str:
        """As 12.34%."""
        return f"<{SMALLEST}%" if 0 < self < SMALLEST / 200 else f"{100 * self:.2f}%"


def _column(rows: Rows, name: str) -> Column:
    values = [row.get(name) for row in rows]
    numeric = all(isinstance(value, int | float | None) for value in values)
    shown = tuple(str(value) if isinstance(value, Share) else cell(value) for value in values)
    return Column(name, shown, numeric)


def _total(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + len(GAP) * (len(columns) - 1)


def _without_constants(columns: list[Column], width: int) -> tuple[list[Column], list[str]]:
    """Columns that vary, and the others in words, where not all fit. The first column always stays."""
    if _total(columns) <= width:
        return columns, []
    alike = [column for column in columns[1:] if column.constant]
    return [column for column in columns if column not in alike], [f"{each.head} {each.cells[0]}" for each in alike]


def _spared(columns: list[Column], spare: Sequence[str], width: int) -> tuple[list[Column], list[str]]:
    """Columns without as many of `spare` as it takes to fit; all of them where that is not enough."""
    left: list[str] = []
    for name in (*spare, ""):
        kept = [column for column in columns if column.head not in left]
        if _folded(kept, width):
            return kept, left
        left += [name] if name in {column.head for column in kept} else []
    return columns, []


def _drawn(columns: Sequence[Column], width: int) -> list[str]:
    if not columns:
        return []
    if widths := _folded(columns, width):
        return _lines(columns, widths)
    numbers = [column for column in columns if column.numeric]
    if numbers and _total(numbers) + len(GAP) <= width:
        return _stacked(columns, numbers, width)
    return [line for at in range(len(columns[0].cells)) for line in (*_pairs(columns, at, width), "")]


def _folded(columns: Sequence[Column], width: int) -> list[int]:
    """The width of each column, the widest of those that can be folded made narrow; none if that is not enough."""
    widths = [column.width for column in columns]
    for _ in range(_total(columns) - width):
        foldable = [at for at, column in enumerate(columns) if widths[at] > column.least]
        if not foldable:
            return []
        widths[max(foldable, key=widths.__getitem__)] -= 1
    return widths


def _lines(columns: Sequence[Column], widths: Sequence[int]) -> list[str]:
    """Head, rule and rows; a cell that is folded takes several lines."""
    rule = "─" * (sum(widths) + len(GAP) * (len(widths) - 1))
    rows = range(len(columns[0].cells))
    body = [line for at in rows for line in _line([column.cells[at] for column in columns], columns, widths)]
    heads = [
        _Heads(width, break_long_words=False).wrap(column.head) for column, width in zip(columns, widths, strict=True)
    ]
    return [*_joined(heads, columns, widths), rule, *body]


def _line(texts: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> list[str]:
    """One text per column, as many lines as the longest takes."""
    return _joined([_wrapped(text, width) for text, width in zip(texts, widths, strict=True)], columns, widths)


class _Heads(TextWrapper):
    """Breaks `relaxed_belady hits` after `relaxed_` too."""

    def _split(self, text: str) -> list[str]:
        return [piece for piece in re.split(f"({HEAD_BREAKS})", text) if piece]


def _joined(pieces: Sequence[Sequence[str]], columns: Sequence[Column], widths: Sequence[int]) -> list[str]:
    """The lines of each column's text beside those of the others."""
    return [GAP.join(map(Column.padded, columns, line, widths)).rstrip() for line in zip_longest(*pieces, fillvalue="")]


def _wrapped(text: str, width: int) -> list[str]:
    return [text] if len(text) <= width else wrap(text, width, break_on_hyphens=False)


def _stacked(columns: Sequence[Column], numbers: Sequence[Column], width: int) -> list[str]:
    """The numbers of a row below a line of its texts, each with its name."""
    texts = [column for column in columns if not column.numeric]
    head, rule, *rows = _lines(numbers, [column.width for column in numbers])
    lines = [GAP + head, rule + "─" * len(GAP)]
    for at, row in enumerate(rows):
        label = "; ".join(f"{column.head} {column.cells[at]}" for column in texts)
        lines += [*_wrapped(label, width), GAP + row]
    return lines


def _pairs(columns: Sequence[Column], at: int, width: int) -> list[str]:
    """A row as names and values, as many on a line as fit."""
    lines = [""]
    for pair in (f"{column.head} {column.cells[at]}" for column in columns):
        joined = f"{lines[-1]}; {pair}" if lines[-1] else pair
        lines = [*lines[:-1], joined] if len(joined) <= width else [*lines, pair]
    return [line for line in lines if line]


# -- Rankings as a terminal shows them: short heads, shares in percent, and what the heads mean.

#: Columns of what is forecast.
FORECAST = {name: f"forecast {name}" for name in ("loss", "low", "high")}
#: Columns of a ranking by their heads; the whole names are in files, --csv and --json.
HEADS = {
    "identity": "id",
    "compulsory_limit": "limit",
    **{name: metric.head for name, metric in METRICS.items() if metric.head},
    FORECAST["low"]: "low",
    FORECAST["high"]: "high",
}
SHARES = ("hit_rate", "belady_hit_rate", "compulsory_limit", "collisions_per_miss", *FORECAST.values())
#: What may be left out, first to go first.
SPARE = (
    "id",
    "half_width",
    "better_on",
    "requests",
    "limit",
    "GB lower",
    "GB",
    "coll",
    "tok/s",
    "belady",
    "low",
    "high",
)
#: What heads mean, each line for a table that has its first.
LEGEND = {
    "belady": "belady, limit: the most hits of any eviction, of any cache, without prefetch",
    "coll": "coll: misses of what the same pass evicted",
    "TPOT": "TTFT, TPOT in ms; --csv: all digits",
}
DIGITS = 8  #: of an identity


def drawn(rows: Sequence[Mapping[str, Any]], width: int = 0) -> list[str]:
    """A ranking as a table, and its legend."""
    shown = table([_short(row) for row in rows], spare=SPARE, width=width)
    return [*([shown] if rows else []), *(folded(line, width) for line in _legend(rows, shown))]


def _legend(rows: Sequence[Mapping[str, Any]], shown: str) -> list[str]:
    """What the heads of a ranking mean, of columns that are in the table or said above it."""
    if not rows or "belady_hit_rate" not in rows[0]:
        return []
    above = shown.partition("─")[0].split()
    said = [text for head, text in LEGEND.items() if head in above]
    return [*said[:-2], "; ".join(said[-2:])] if "coll" in above else said


def _short(row: Mapping[str, Any]) -> dict[str, object]:
    return {HEADS.get(name, name): _value(name, value) for name, value in row.items()}


def _value(name: str, value: Any) -> object:
    if name in SHARES and value is not None:
        return Share(value)
    return str(value)[:DIGITS] if name == "identity" else value
