"""How well other models' routing, scaled to a model's shape, stands for its own: hits of each shipped model, left out.

Last changed in commit bb8bebef. Does other models' routing stand for a model's own?
Answer: weakly: docs/routing.md.

For every shipped routing model the hits of LRU, LFU, a static placement and Belady, at five capacities of a pool per
layer, are drawn from it and from all others at its shape. Printed are the mean, the range over the others, how often
the range holds the model's own, and how far the middle of the range is off.
"""

from __future__ import annotations

import numpy as np

from moereplay.analysis.tables import table
from moereplay.simulator.routing import EVICTIONS, misses_of
from moereplay.traces.routing import RoutingModel, draw, shipped

SHARES = (0.125, 0.25, 0.375, 0.5, 0.75)
LENGTHS = [192] * 4
LAYERS = 12


def hits(model: RoutingModel) -> np.ndarray:
    """Return the hit rates (evictions x shares,) of some of its layers together."""
    places = np.unique(np.linspace(0, model.layers - 1, LAYERS).round().astype(int)).tolist()
    chosen = draw(model.at_layers(places), LENGTHS, 1)
    capacities = [max(model.k, round(share * model.experts)) for share in SHARES]
    missed = [misses_of(chosen[:, layer], model.experts, capacities) for layer in range(len(places))]
    return 1 - np.sum(missed, axis=0) / chosen.size


def main() -> None:
    """Print a row for each routing model, and one for all."""
    real = {name: model for name, model in shipped().items() if not model.trial}
    rows, held, wide, off = [], [], [], []
    for name, model in real.items():
        own = hits(model)
        others = {
            each: hits(other.scaled(model.layers, model.experts, model.k))
            for each, other in real.items()
            if other.model != model.model
        }
        values = np.array(list(others.values()))
        least, most = values.min(axis=0), values.max(axis=0)
        held.append(((own >= least) & (own <= most)).mean())
        wide.append((most - least).mean())
        off.append(np.abs((least + most) / 2 - own).mean())
        nearest = min(others, key=lambda each: np.abs(others[each] - own).mean())
        rows.append(
            {
                "left out": name,
                "own hits": f"{100 * own.mean():.1f}%",
                "others": f"{100 * least.mean():.1f} to {100 * most.mean():.1f}%",
                "range holds": f"{100 * held[-1]:.0f}% of {len(own)}",
                "middle off by": f"{100 * off[-1]:.1f} points",
                "nearest": f"{nearest}, {100 * np.abs(others[nearest] - own).mean():.1f} points",
            }
        )
    print(table(rows))
    print(
        f"in the mean the range is {100 * np.mean(wide):.1f} points wide and holds {100 * np.mean(held):.0f}% "
        f"of the hit rates; its middle is {100 * np.mean(off):.1f} points off ({', '.join(EVICTIONS)})"
    )


if __name__ == "__main__":
    main()
