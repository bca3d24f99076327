"""Tables of measured runs in series, made by a known law: the slower CPU and the fixed step of one machine."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

from moereplay.sweeps.recommend.measured import decoded

#: 40 layers of 64 experts of 2 MiB, 4 of them active.
SHAPE = {"model": "a model", "moe_layers": "40", "experts": "64", "top_k": "4", "expert_mib": "2", "model_gib": "6"}
MACHINE = {"gpu": "RTX 3090", "cpu": "EPYC 32c", "ram_gib": "64", "ram_bw_gbs": "50", "ram_bw_kind": "measured"}
RUN = SHAPE | MACHINE | {"engine": "llama.cpp b1", "placement": "cpu_layers", "on_miss": "cpu", "load": "ram"}
LAYERS = (40, 30, 20, 10, 0)
FACTOR, STEP = 1.7, 12e6  #: the machine's CPU is slower than its rate says, and 12 ms of a token are something else


def law(name: str, factor: float = FACTOR, step: float = STEP, **said: str) -> dict[str, str]:
    """A run of the machine that the law describes, to six digits."""
    row = defaultdict(str, RUN | {"id": name, "series": "desk", "decode_tok_s": "1"} | said)
    row["decode_tok_s"] = f"{1e9 / decoded(row, strict=False).time(factor, step):.6g}"
    return dict(row)


def table(folder: Path, *more: dict[str, str]) -> Path:
    rows = [law(f"desk-{layers}", cpu_moe_layers=str(layers)) for layers in LAYERS] + list(more)
    path = folder / "runs.csv"
    with path.open("w", newline="") as stream:
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(stream, names, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path
