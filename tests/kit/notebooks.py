"""Run the code cells of docs/NAME.ipynb in one namespace, as Jupyter does, and keep what they print and show.

`python -m tests.kit.notebooks` writes the outputs into the notebooks.
"""

from __future__ import annotations

import ast
import base64
import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import count
from typing import Any

import matplotlib
from matplotlib import pyplot

from tests.kit.recordings import ROOT

NAMES = ("tour", "paper")
Notebook = dict[str, Any]


def read(name: str) -> Notebook:
    return json.loads((ROOT / "docs" / f"{name}.ipynb").read_text("utf-8"))


def run(notebook: Notebook) -> Notebook:
    """Return the notebook with the outputs of today."""
    matplotlib.use("agg")
    space: dict[str, Any] = {}
    numbers = count(1)
    return notebook | {
        "cells": [
            cell if cell["cell_type"] != "code" else cell | _run("".join(cell["source"]), space, next(numbers))
            for cell in notebook["cells"]
        ]
    }


def _run(source: str, space: dict[str, Any], number: int) -> dict[str, Any]:
    return {"execution_count": number, "outputs": list(_outputs(source, space, number))}


def texts(notebook: Notebook) -> list[list[Any]]:
    """Return, for each code cell, its number, what it printed, and of each value shown the text and the kinds."""
    found = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            shown = [each.get("text") or [each["data"]["text/plain"], sorted(each["data"])] for each in cell["outputs"]]
            found.append([cell["execution_count"], *shown])
    return found


def _outputs(source: str, space: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Run a cell; yield what it printed, the figures of pyplot, and the value of a last expression."""
    body, value, printed = ast.parse(source).body, None, io.StringIO()
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    with redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "cell", "exec"), space)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), space)
    if text := printed.getvalue():
        yield {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
    for each in map(pyplot.figure, pyplot.get_fignums()):
        yield {"data": _data(each), "metadata": {}, "output_type": "display_data"}
    pyplot.close("all")
    if value is not None:
        yield {"data": _data(value), "execution_count": number, "metadata": {}, "output_type": "execute_result"}


def _data(value: Any) -> dict[str, Any]:
    text = {"text/plain": repr(value).splitlines(keepends=True)}
    if not hasattr(value, "savefig"):
        return text
    drawn = io.BytesIO()
    value.savefig(drawn, format="png", dpi=80, metadata={"Software": None})
    return {"image/png": base64.b64encode(drawn.getvalue()).decode()} | text


if __name__ == "__main__":
    for name in NAMES:
        written = json.dumps(run(read(name)), indent=1, ensure_ascii=False)
        (ROOT / "docs" / f"{name}.ipynb").write_text(f"{written}\n", "utf-8")
