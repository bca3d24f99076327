"""Vega: its runtime as one script, specifications compiled for it, and still pictures for print and without scripts.

vl-convert, of the extra `report`, brings Vega and Vega-Lite along and runs them itself, so nothing is fetched.
"""

from __future__ import annotations

import base64
import re
from functools import cache
from importlib.resources import files
from typing import Any

from moereplay.analysis.report.figure import Spec
from moereplay.traces.documents import json_text

STILL_WIDTH = 720  #: pixels
RUNTIME = "window.vegaEmbed = vegaEmbed;"


@cache
def runtime() -> str:
    """Vega as a script for a page, behind its licences; it cannot end the element that it stands in."""
    import vl_convert

    notice = files("moereplay.analysis.report").joinpath("vega_licences.txt").read_text("utf-8")
    return f"/*\n{notice}*/\n{script_safe(vl_convert.javascript_bundle(RUNTIME))}"


def script_safe(text: str) -> str:
    """JavaScript in which no string can be taken for the end of a script, or for a comment of HTML."""
    return re.sub("</(?=script)", r"<\\/", text, flags=re.IGNORECASE).replace("<!--", r"<\!--")


def compiled(spec: Spec) -> dict[str, Any]:
    """For Vega, without the address of its schema."""
    import vl_convert

    made = vl_convert.vegalite_to_vega(spec)
    return {name: value for name, value in made.items() if name != "$schema"}


def still(spec: Spec) -> str:
    """A picture as the address of an image that holds it."""
    import vl_convert

    svg = _renumbered(vl_convert.vegalite_to_svg(json_text(spec | {"width": STILL_WIDTH})))
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _renumbered(svg: str) -> str:
    """Vega numbers clips through all pictures of a process; here each begins with the first."""
    numbers = {name: at for at, name in enumerate(dict.fromkeys(re.findall(r"\bclip\d+\b", svg)))}
    return re.sub(r"\bclip\d+\b", lambda found: f"clip{numbers[found[0]]}", svg)
