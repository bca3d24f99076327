"""Markers as SVG paths in the square from -1 to 1: in figures and in their legends the same, whatever draws them."""

from __future__ import annotations

from math import cos, pi, sin

from moereplay.analysis.palette import UNKNOWN_MARKERS, Marker

UNKNOWN_STARS = [each for each in UNKNOWN_MARKERS if not isinstance(each, str)]

CIRCLE = "M1,0A1,1,0,1,1,-1,0A1,1,0,1,1,1,0Z"
PLUS = "M-.35,-1L.35,-1L.35,-.35L1,-.35L1,.35L.35,.35L.35,1L-.35,1L-.35,.35L-1,.35L-1,-.35L-.35,-.35Z"
CROSS = "M-1,-.6L-.6,-1L0,-.4L.6,-1L1,-.6L.4,0L1,.6L.6,1L0,.4L-.6,1L-1,.6L-.4,0Z"
THIN = "M-1,-.8L-.8,-1L0,-.2L.8,-1L1,-.8L.2,0L1,.8L.8,1L0,.2L-.8,1L-1,.8L-.2,0Z"


def _polygon(corners: int, turned: float = 0.0, inner: float = 1.0) -> str:
    """A regular one with its first corner on top, turned clockwise by quarters; a star where `inner` is less than 1."""
    radii = [1.0] if inner == 1 else [1.0, inner]
    angles = [2 * pi * at / (corners * len(radii)) + turned * pi / 2 for at in range(corners * len(radii))]
    lengths = radii * corners
    places = [(length * sin(angle), -length * cos(angle)) for length, angle in zip(lengths, angles, strict=True)]
    return "M" + "L".join(f"{x:.3f},{y:.3f}" for x, y in places) + "Z"


#: By matplotlib's markers, which `analysis.palette` uses.
PATHS: dict[Marker, str] = {
    **{(corners, 1, degrees): _polygon(corners, -degrees / 90, 0.45) for corners, _, degrees in UNKNOWN_STARS},
    "o": CIRCLE,
    "s": "M-.9,-.9L.9,-.9L.9,.9L-.9,.9Z",
    "^": _polygon(3),
    "v": _polygon(3, 2),
    "<": _polygon(3, 3),
    ">": _polygon(3, 1),
    "D": _polygon(4),
    "d": "M0,-1L.6,0L0,1L-.6,0Z",
    "p": _polygon(5),
    "h": _polygon(6),
    "H": _polygon(6, 1),
    "8": _polygon(8),
    "*": _polygon(5, inner=0.45),
    "P": PLUS,
    "X": CROSS,
    "x": THIN,
}
