"""How well generic routing stands for a model that was not recorded: each family of shipped models, left out.

Last changed in commit df2ace8f. Does other models' routing stand for a model's own?
Answer: its range does, its middle weakly: studies/pages/routing.md, which says what is measured here.

With a folder of recordings, errors, gains and real hits are measured, and routing models that ship are written anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

from moereplay.analysis.tables import table
from moereplay.calibration.routing import error, fitted_and_judged, rates
from moereplay.traces.files import bundled
from moereplay.traces.geometry import known
from moereplay.traces.importers import registry
from moereplay.traces.importers.contract import Options
from moereplay.traces.routing import FOLDER, GENERIC, PARTS, RoutingModel, as_toml, draws, routings_for, shipped
from moereplay.traces.schema import Geometry, Trace, memory_trace
from moereplay.traces.store import open_trace

MEASURED = Path(__file__).with_suffix(".json")
RECORDED = {"gpt-oss-20b": "gpt-oss-20b/gptoss20b_decode.npz", "gemma-4-26b-a4b": "gemma-4-26b-a4b/gemma.route.csv"}
RECORDED |= {f"qwen3-30b-a3b-{text}": f"qwen3-30b-a3b/{text}.npz" for text in ("code", "general", "math", "medical")}
EVICTIONS = ("lru", "lfu:count=history", "belady")
TOKENS, LENGTHS, LAYERS, LEVEL = 1536, [192] * 4, 12, 0.95
GAINS = (0.3, 0.45, 0.65, 0.85, 1.1, 1.5, 2.1, 3.0)
#: Measured by others on published recordings (ngavhane/moe-beyond, 37,786 tokens; speculative-moe@216e26e, 577 tokens):
#: the share of experts that the token before used, and hits of LRU at 25 % with a pool per layer.
CHECKS = {"deepseek-v2-lite": (0.230, 0.439), "mixtral-8x7b": (0.394, 0.393)}


def at_gain(gain: float, left_out: str = "", name: str = "generic", summary: str = "") -> RoutingModel:
    """Return the mean strengths of all models but one, times a gain; what fades fast is not raised above its mean."""
    logs: dict[str, list[list[float]]] = {}
    for each in shipped().values():
        if not each.trial and each.model != left_out:
            logs.setdefault(each.model, []).append([np.log(getattr(each, part)).mean() for part in PARTS])
    values = np.exp(np.mean([np.mean(texts, axis=0) for texts in logs.values()], axis=0))
    values *= [gain, gain, gain, gain, min(gain, 1), gain, 1, 1]
    parts: dict[str, Any] = {part: (value,) for part, value in zip(PARTS, values.tolist(), strict=True)}
    source = "make study-routing"
    return RoutingModel(name=name, summary=summary, source=source, layers=1, experts=128, k=8, **parts)


def generic(real: dict[str, Any], left_out: str = "") -> list[RoutingModel]:
    """Return the routing of low, middle and high locality that all models but one lead to."""
    logs: dict[str, list[float]] = {}
    for each in real.values():
        if each["model"] != left_out:
            logs.setdefault(each["model"], []).append(np.log(each["gain"]))
    means = [np.mean(texts) for texts in logs.values()]
    wide = stdtrit(len(means) - 1, (1 + LEVEL) / 2) * np.std(means, ddof=1) * (1 + 1 / len(means)) ** 0.5
    gains = np.exp(np.mean(means) + wide * np.array([-1, 0, 1])).tolist()
    about = [f"no model's: the mean strengths of {len(means)} models, times {gain:.3g}" for gain in gains]
    return [at_gain(gain, left_out, *names) for gain, *names in zip(gains, GENERIC, about, strict=True)]


def drawn(models: Sequence[RoutingModel], real: dict[str, Any]) -> list[np.ndarray]:
    """Return the hit rates of routing models at the shape and lengths of real requests."""
    ids = draws([model.scaled(*real["shape"]) for model in models], real["lengths"])
    return [rates(each, real["lengths"], shape(*real["shape"]), EVICTIONS) for each in ids]


def shape(layers: int, experts: int, k: int) -> Geometry:
    """Return a geometry of experts of one size."""
    return Geometry(layers=layers, experts=experts, k=k, expert_bytes=(1 << 20,) * layers)


def measure(model: RoutingModel, trace: Trace | None) -> dict[str, Any]:
    """Return the hits of a recording's end, or of the model's own draw, and the gain of the others' mean strengths."""
    places = np.unique(np.linspace(0, model.layers - 1, LAYERS).round().astype(int)).tolist()
    real = {"model": model.model, "shape": (len(places), model.experts, model.k), "lengths": LENGTHS}
    if trace:
        ids, real["lengths"] = fitted_and_judged(trace, TOKENS)[1]
        hits = rates(ids[:, places], real["lengths"], shape(*real["shape"]), EVICTIONS)
    else:
        hits = drawn([model.at_layers(places)], real)[0]
    means = [each[hits > 0].mean() for each in drawn([at_gain(gain, model.model) for gain in GAINS], real)]
    gain = float(np.exp(np.interp(hits[hits > 0].mean(), means, np.log(GAINS))))
    return real | {"hits": hits.round(4).tolist(), "gain": round(gain, 3)}


def remeasure(folder: Path) -> None:
    """State the errors of the models that ship, from the end of their recordings, and write the generic ones."""
    traces = {"miniature": open_trace(bundled(Path("miniature")))}
    for name, path in RECORDED.items():
        foreign = registry.read(folder / path, Options(expert_bytes=1 << 20))
        traces[name] = memory_trace(foreign.header, list(foreign.requests))
    for name, trace in traces.items():
        model = shipped()[name]
        stated = model.model_copy(update={"error": error(model, *fitted_and_judged(trace), trace.geometry, 1)})
        (FOLDER / f"{name}.toml").write_text(as_toml(stated))
    real = {name: measure(model, traces.get(name)) for name, model in shipped().items() if not model.trial}
    MEASURED.write_text(json.dumps(real).replace("}, ", "},\n") + "\n")
    for model in generic(real):
        (FOLDER / f"{model.name}.toml").write_text(as_toml(model))


def measured() -> dict[str, Any]:
    """Return the real hits and the gain of each recording, by name of its routing model."""
    return json.loads(MEASURED.read_text())


def held(real: dict[str, Any]) -> dict[str, list[tuple[float, float, float]]]:
    """Return which share of real hits the others' range holds, how wide it is, how far its middle is off, by model."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for each in real.values():
        low, middle, high = drawn(generic(real, each["model"]), each)
        hits = np.array(each["hits"])
        some = hits > 0
        inside, wide, off = (low <= hits) & (hits <= high), high - low, np.abs(middle - hits)
        of = inside[some].mean(), wide[some].mean(), off[some].mean()
        found.setdefault(each["model"], []).append(of)
    return found


def checked() -> Iterator[tuple[float, float, float]]:
    """Yield each published figure of CHECKS between those of the ends of the generic routing that ships."""
    for name, published in CHECKS.items():
        made = [each.routing.at_layers(range(LAYERS)) for each in routings_for(name, known(name).geometry)]
        geometry, found = shape(LAYERS, made[0].experts, made[0].k), []
        for ids in draws(made, LENGTHS):
            overlap = (ids[1:, :, :, None] == ids[:-1, :, None, :]).any(-1).mean()
            found.append((overlap, rates(ids, LENGTHS, geometry, ("lru",), (0.25,))[0]))
        yield from zip(found[0], published, found[-1], strict=True)


def main() -> None:
    """Print a row for each recording, its model left out, and a line for each published figure."""
    if len(sys.argv) > 1:
        remeasure(Path(sys.argv[1]))
    real = measured()
    texts = held(real)
    rows = []
    for (name, each), (inside, wide, off) in zip(real.items(), chain(*texts.values()), strict=True):
        row = {"left out": name, "gain": f"{each['gain']:.2f}", "hits": f"{100 * np.mean(each['hits']):.1f}%"}
        rows.append(row | {"inside": f"{100 * inside:.0f}%", "wide": f"{100 * wide:.0f}", "off": f"{100 * off:.1f}"})
    print(table(rows))
    inside, wide, off = np.mean([np.mean(model, axis=0) for model in texts.values()], axis=0)
    print(f"mean over models: {100 * inside:.1f}% inside, {100 * wide:.1f} wide, middle {100 * off:.1f} points off")
    for low, published, high in checked():
        print(f"{low:.3f} to {high:.3f} for {published:.3f}")


if __name__ == "__main__":
    main()
