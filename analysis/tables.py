"""Text tables for a terminal or a pipe. They fit its width, and numbers are never wrapped.

A table that is too wide drops, until it fits: constant columns, which move above the table; columns that the caller can
spare; prose, which is folded; then each row becomes a line of text above its numbers.
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

from moereplay.results.result import METRICS
from moereplay.traces.texts import SMALLEST, escaped, in_csv, in_latex, in_markdown

if TYPE_CHECKING:
    from rich.console import Console


WIDTH = 80  #: columns of a stream that is not a terminal, unless COLUMNS is set
GAP = "  "
LONG = 24  #: longer texts of several words are prose
VAST = 1e12  #: larger floats are written with an exponent
TINY = 0.0001  #: smaller floats are written as <0.0001
NARROWEST = 16  #: columns of folded prose
HEAD_BREAKS = r" +|(?<=_)(?=\w)"
COMMAND = ": moereplay "  #: begins a command at the end of a line
KEPT = "\N{NO-BREAK SPACE}"  #: textwrap breaks lines at ASCII spaces only

Rows = Sequence[Mapping[str, object]]


@dataclass(frozen=True)
class Column:
    """A head and its cells as text."""

    head: str
    cells: tuple[str, ...]
    numeric: bool

    @property
    def width(self) -> int:
        """Width of the widest cell or of the head."""
        return max(map(len, (self.head, *self.cells)))

    @property
    def least(self) -> int:
        """Width to which it can be folded: numbers and short texts stay whole, heads break after spaces and `_`."""
        if self.prose:
            return NARROWEST
        return max(map(len, (*re.split(HEAD_BREAKS, self.head), *self.cells)), default=0)

    @property
    def prose(self) -> bool:
        """True if the column holds sentences, which can be folded."""
        return not self.numeric and any(len(cell) > LONG and " " in cell for cell in self.cells)

    @property
    def constant(self) -> bool:
        """True if several cells are all equal."""
        return len(self.cells) > 1 and len(set(self.cells)) == 1

    def padded(self, text: str, width: int) -> str:
        """Pad a text to the column's width; numbers are right-aligned."""
        return text.rjust(width) if self.numeric else text.ljust(width)


def width_of(stream: object = None) -> int:
    """Return the width of the terminal behind a stream, or COLUMNS, or 80."""
    isatty: Callable[[], bool] = getattr(stream or sys.stdout, "isatty", bool)
    columns = shutil.get_terminal_size((WIDTH, 24)).columns if isatty() else _of_environment()
    return max(columns, NARROWEST)


def _of_environment() -> int:
    """Read only COLUMNS: get_terminal_size would query the terminal that started a pipe."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else WIDTH


def console(stderr: bool = False) -> Console:
    """Return a console that prints text unchanged; progress bars use it too."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=width_of(stream), highlight=False, markup=False, soft_wrap=True)  # [x] is text


def table(rows: Rows, title: str = "", spare: Sequence[str] = (), width: int = 0, more: str = "--csv") -> str:
    """Format rows with a column per key; numbers are right-aligned, floats have four significant digits.

    `spare` lists columns that may be dropped, first to go first, and `more` the option that prints them. `width`
    defaults to the terminal's.
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
    """Format rows as a Markdown table of any width."""
    columns = [_column(rows, name) for name in dict.fromkeys(name for row in rows for name in row)]
    lines = [[column.head for column in columns], ["--:" if column.numeric else "---" for column in columns]]
    lines += [[in_markdown(column.cells[at]) for column in columns] for at in range(len(rows))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def csv(rows: Rows) -> str:
    """Format rows as CSV with every digit; missing values are empty, and spreadsheets read no text as a formula."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    written = StringIO()
    writer = DictWriter(written, names, lineterminator="\n")
    writer.writerow({name: in_csv(name) for name in names})
    for row in rows:
        writer.writerow({name: in_csv(value) if isinstance(value, str) else value for name, value in row.items()})
    return written.getvalue().rstrip("\n")


def folded(text: str, width: int = 0, hanging: str = GAP) -> str:
    """Fold a line to the width; continuation lines are indented. A longer word is not broken.

    Text in backticks stays whole, so does a command at the end, which gets its own line, and ± stays with its number.
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
    """Format names with their texts, folded; a name is empty for further texts of the one before."""
    width, names = width or width_of(), max(len(name) for name, _ in pairs)
    return [line for name, text in pairs for line in _beside(f"{name:{names}}{GAP}", text, width)]


def _beside(name: str, text: str, width: int) -> list[str]:
    room = max(width - len(name), NARROWEST)
    first, *others = lines = folded(text, room, "").splitlines() or [""]
    if max(map(len, lines)) > room:  # text that cannot be folded gets its own line
        return [name.rstrip(), GAP + text]
    return [(name + first).rstrip(), *(" " * len(name) + line for line in others)]


def cell(value: object) -> str:
    """Format a value: floats with four significant digits, thousands with commas.

    Huge floats are written as 4e+24, tiny ones as <0.0001.
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
    """A share, printed in percent."""

    def __str__(self) -> str:
        """Format as 12.34%."""
        return f"<{SMALLEST}%" if 0 < self < SMALLEST / 200 else f"{100 * self:.2f}%"


def _column(rows: Rows, name: str) -> Column:
    values = [row.get(name) for row in rows]
    numeric = all(isinstance(value, int | float | None) for value in values)
    shown = tuple(str(value) if isinstance(value, Share) else cell(value) for value in values)
    return Column(name, shown, numeric)


def _total(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + len(GAP) * (len(columns) - 1)


def _without_constants(columns: list[Column], width: int) -> tuple[list[Column], list[str]]:
    """Move constant columns into words if not all columns fit. The first column always stays."""
    if _total(columns) <= width:
        return columns, []
    alike = [column for column in columns[1:] if column.constant]
    return [column for column in columns if column not in alike], [f"{each.head} {each.cells[0]}" for each in alike]


def _spared(columns: list[Column], spare: Sequence[str], width: int) -> tuple[list[Column], list[str]]:
    """Drop spare columns until the rest fits; drop none if that does not help."""
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
    """Return the column widths after folding prose; empty if they do not fit."""
    widths = [column.width for column in columns]
    for _ in range(_total(columns) - width):
        foldable = [at for at, column in enumerate(columns) if widths[at] > column.least]
        if not foldable:
            return []
        widths[max(foldable, key=widths.__getitem__)] -= 1
    return widths


def _lines(columns: Sequence[Column], widths: Sequence[int]) -> list[str]:
    rule = "─" * (sum(widths) + len(GAP) * (len(widths) - 1))
    rows = range(len(columns[0].cells))
    cells = ([_wrapped(column.cells[at], width) for column, width in zip(columns, widths, strict=True)] for at in rows)
    body = [line for row in cells for line in _joined(row, columns, widths)]
    heads = [
        _Heads(width, break_long_words=False).wrap(column.head) for column, width in zip(columns, widths, strict=True)
    ]
    return [*_joined(heads, columns, widths), rule, *body]


class _Heads(TextWrapper):
    """Breaks `relaxed_belady hits` after `relaxed_` too."""

    def _split(self, text: str) -> list[str]:
        return [piece for piece in re.split(f"({HEAD_BREAKS})", text) if piece]


def _joined(pieces: Sequence[Sequence[str]], columns: Sequence[Column], widths: Sequence[int]) -> list[str]:
    return [GAP.join(map(Column.padded, columns, line, widths)).rstrip() for line in zip_longest(*pieces, fillvalue="")]


def _wrapped(text: str, width: int) -> list[str]:
    return [text] if len(text) <= width else wrap(text, width, break_on_hyphens=False)


def _stacked(columns: Sequence[Column], numbers: Sequence[Column], width: int) -> list[str]:
    texts = [column for column in columns if not column.numeric]
    head, rule, *rows = _lines(numbers, [column.width for column in numbers])
    lines = [GAP + head, rule + "─" * len(GAP)]
    for at, row in enumerate(rows):
        label = "; ".join(f"{column.head} {column.cells[at]}" for column in texts)
        lines += [*_wrapped(label, width), GAP + row]
    return lines


def _pairs(columns: Sequence[Column], at: int, width: int) -> list[str]:
    lines = [""]
    for pair in (f"{column.head} {column.cells[at]}" for column in columns):
        joined = f"{lines[-1]}; {pair}" if lines[-1] else pair
        lines = [*lines[:-1], joined] if len(joined) <= width else [*lines, pair]
    return [line for line in lines if line]


# -- Rankings on a terminal: short headings, shares in percent, and a legend.

#: Columns of a forecast.
FORECAST = {name: f"forecast {name}" for name in ("loss", "low", "high")}
#: Heads of a ranking's columns; files, --csv and --json use the full names.
HEADS = {
    "identity": "id",
    "ttft_p50_ms": "TTFT p50",
    "ttft_p99_ms": "TTFT p99",
    "tpot_p99_ms": "TPOT p99",
    "e2e_p99_ms": "e2e p99",
    "compulsory_limit": "limit",
    **{name: metric.head for name, metric in METRICS.items() if metric.head},
    FORECAST["low"]: "low",
    FORECAST["high"]: "high",
}
LATENCY = "ttft_p50_ms"  #: a serving figure
#: Heads of columns that beside serving figures would have the head of another figure.
ALONE = {"ttft_mean_ms": "prefill", "tokens_per_s": "tok/s each"}
SHARES = ("hit_rate", "belady_hit_rate", "compulsory_limit", "collisions_per_miss", *FORECAST.values())
#: Columns that may be dropped, first to go first.
SPARE = (
    "id",
    "half_width",
    "better_on",
    "requests",
    "limit",
    "GB lower",
    "mJ/tok",
    "GB",
    "coll",
    "tok/s",
    "tok/s each",
    "belady",
    "low",
    "high",
)
#: Meanings of heads; a line is printed if the table has its key.
LEGEND = {
    "belady": "belady, limit: upper bound on hits for any eviction, any cache, without prefetch",
    "coll": "coll: misses on experts evicted earlier in the same pass",
    "mJ/tok": "mJ/tok: energy per decoded token, by the platform's [power]",
    "TPOT": "TTFT, TPOT in ms; --csv: all digits",
}
DIGITS = 8  #: of a digest or an identity that are printed


def drawn(rows: Sequence[Mapping[str, Any]], width: int = 0, serving: bool = False) -> list[str]:
    """Return a ranking as a table and its legend; `serving`: serving figures follow it."""
    heads = HEADS | (ALONE if serving or any(LATENCY in row for row in rows) else {})
    known = {name for row in rows for name, value in row.items() if value is not None}
    filled = [{name: value for name, value in row.items() if name in known} for row in rows]
    short = [{heads.get(name, name): _value(name, value) for name, value in row.items()} for row in filled]
    shown = table(short, spare=SPARE, width=width)
    return [*([shown] if rows else []), *(folded(line, width) for line in _legend(rows, shown))]


def _legend(rows: Sequence[Mapping[str, Any]], shown: str) -> list[str]:
    """Return the meanings of the heads that the table shows."""
    if not rows or "belady_hit_rate" not in rows[0]:
        return []
    above = shown.partition("─")[0].split()
    said = [text for head, text in LEGEND.items() if head in above]
    return [*said[:-2], "; ".join(said[-2:])] if "coll" in above else said


def _value(name: str, value: Any) -> object:
    if name in SHARES and value is not None:
        return Share(value)
    return str(value)[:DIGITS] if name in ("identity", "trace") else value


# -- The same for a paper: a table of booktabs, with numbers and their intervals in math mode.

#: The ends of an interval that are not called as their figure is.
ENDS = {"difference": ("low", "high"), FORECAST["loss"]: (FORECAST["low"], FORECAST["high"])}
#: Columns that a paper does without: --csv has them.
NOT_IN_PAPERS = ("identity", "half_width", "better_on")


def latex(rows: Rows, comments: Sequence[str] = (), shares: Sequence[str] = SHARES) -> str:
    """Format rows as a LaTeX tabular for the package booktabs, below `comments`; `shares` are columns in percent.

    `FIGURE_low` and `FIGURE_high` follow their figure in brackets.
    """
    filled = {name for row in rows for name, value in row.items() if value is not None}
    known = [name for name in dict.fromkeys(name for row in rows for name in row) if name in filled]
    ends = {name: ENDS.get(name, (f"{name}_low", f"{name}_high")) for name in known}
    inside = {end for pair in ends.values() for end in pair}
    shown = [name for name in known if name not in inside and name not in NOT_IN_PAPERS]
    kinds = "".join("l" if any(isinstance(row.get(name), str) for row in rows) else "r" for name in shown)
    heads = [_paper_head(name, name in shares) for name in shown]
    cells = [[_in_math(row, name, ends[name], name in shares) for name in shown] for row in rows]
    head, *body = (f"{' & '.join(line)} \\\\" for line in (heads, *cells))
    said = [f"% {escaped(line)}" for line in comments]
    begin = [f"\\begin{{tabular}}{{{kinds}}}", "\\toprule", head, "\\midrule"]
    return "\n".join([*said, *begin, *body, "\\bottomrule", "\\end{tabular}"])


def _paper_head(name: str, share: bool) -> str:
    unit = r" (\%)" if share else " (ms)" if name.endswith("_ms") else ""
    return in_latex(HEADS.get(name, name.replace("_", " "))) + unit


def _in_math(row: Mapping[str, object], name: str, ends: tuple[str, str], share: bool) -> str:
    """Return a cell: a text, or a number with its interval if there is one."""
    value, *between = (row.get(each) for each in (name, *ends))
    if value is None or isinstance(value, str | bool):
        return "--" if value is None else in_latex(str(value))
    number, low, high = (None if each is None else _math(each, share) for each in (value, *between))
    return f"${number}$" if low is None or high is None else f"${number}\\ [{low},\\,{high}]$"


def _math(value: object, share: bool) -> str:
    if share and isinstance(value, int | float):
        return f"{100 * value:.2f}"
    usual = isinstance(value, float) and TINY <= abs(value) < 1000
    text = f"{value:#.4g}" if usual else cell(value)  # every figure of a column with as many digits
    mantissa, e, power = text.partition("e")
    return f"{mantissa}\\times10^{{{int(power)}}}" if e else text.replace(",", "{,}")
