"""Numbers as people read them: percent, points, bytes, rates and times, with two to four digits and no exponents.

Every sentence that prints such a number takes it from here. Files, `--csv` and `--json` keep every digit.
"""

from __future__ import annotations

from math import floor, isfinite, log10

SMALLEST = 0.01  #: percent, or points: what is smaller is said to be smaller
SIZES = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))
TIMES = ((10**9, "s"), (10**6, "ms"), (10**3, "us"), (1, "ns"))


def percent(share: float, signed: bool = False) -> str:
    """Return a share in percent: `230%`, `12%`, `4.3%`, `0.41%`, and `<0.01%` for what is smaller.

    With `signed` a gain begins with `+`, and a change of less than 0.005 % is `0%`.
    """
    return _hundredths(share, "%", signed)


def points(share: float, signed: bool = False) -> str:
    """Return a difference of two shares in percentage points: `12 points`, `0.05 points`."""
    return _hundredths(share, " points", signed)


def size(count: float) -> str:
    """Return bytes in decimal units with three digits: `28 B`, `1.5 MB`, `32.4 GB`."""
    return _in_units(count, SIZES)


def rate(per_second: float) -> str:
    """Return bytes per second: `4.2 GB/s`."""
    return f"{size(per_second)}/s"


def duration(ns: float) -> str:
    """Return nanoseconds in the unit that fits: `12.3 ms`, `4.5 s`."""
    return _in_units(ns, TIMES)


def digits(value: float, many: int) -> str:
    """Return a number with so many significant digits, or all before the point; without an exponent."""
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


def _in_units(value: float, units: tuple[tuple[int, str], ...]) -> str:
    for factor, unit in units:
        if abs(value) >= 0.9995 * factor:
            return f"{digits(value / factor, 3)} {unit}"
    return f"{digits(value, 2)} {units[-1][1]}"
