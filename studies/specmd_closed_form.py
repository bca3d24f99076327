"""Explain SpecMD's Table 2 by a closed form, without a replay, and list the table's contradictions.

Last changed in commit ce8d45b0. What explains SpecMD's Table 2?
Answer: docs/papers.md.

In prefill nearly every expert of every layer is demanded once, so TTFT is one scan of all n experts of S bytes over the
link of B bytes/s, with a constant of the software per expert: n * (S / B + C). B is the paper's 5 GB/s, C = 1.75 ms was
chosen after seeing the table. Configurations have experts of 4 bits, HOBBIT's cascade 2 bits, and Table 1's baseline
8 bits. Zhu's configuration substitutes absent experts, so its rows are no scan. An eviction saves at most the share of
the experts that fits: 5 % of the model's bytes at 16 bits, over the bytes of all experts at their own bits.

`python -m studies.specmd_closed_form` prints every figure that studies/pages/papers.md cites.
"""

from __future__ import annotations

from itertools import combinations
from statistics import median
from typing import NamedTuple

import numpy as np

from moereplay.analysis.tables import console, table
from moereplay.sweeps.papers import figures_of
from moereplay.traces.geometry import known

BYTES_PER_S = 5e9
SOFTWARE_MS = 1.75
SHARE = 0.05  #: of the model at 16 bits
BITS = {"Eliseev": 4, "Zhu": 4, "HOBBIT": 2, "MixtureCache": 4}
NO_SCAN = "Zhu"  #: substitutes what is absent
BASELINE_BITS = 8


class Cell(NamedTuple):
    """One model under one configuration: published TTFT in ms without and with Least-Stale."""

    model: str
    configuration: str
    before: float
    after: float

    @property
    def scan_ms(self) -> float:
        """Return the closed form."""
        return scan_ms(self.model, BITS[self.configuration])

    @property
    def saved(self) -> float:
        """Return the published reduction of TTFT."""
        return 1 - self.after / self.before

    @property
    def most(self) -> float:
        """Return the share of the experts that fits, which is what an eviction can save of a scan."""
        model = known(self.model)
        return SHARE * 2 * model.params / (_experts(self.model) * _bytes(self.model, BITS[self.configuration]))


def _experts(model: str) -> int:
    return known(model).geometry.layers * known(model).geometry.experts


def _bytes(model: str, bits: int) -> float:
    return (known(model).geometry.expert_params or 0) * bits / 8


def scan_ms(model: str, bits: int) -> float:
    """Return the time to fetch every expert once."""
    return _experts(model) * (1000 * _bytes(model, bits) / BYTES_PER_S + SOFTWARE_MS)


def cells() -> list[Cell]:
    """Return the 16 cells of the table."""
    published = figures_of("specmd", "table_2")[0].entry.published
    return [Cell(each.model, str(name), *times) for each in published for name, *times in each.quotients]


def baselines() -> dict[str, float]:
    """Return the published TTFT of the 8-bit baseline by model, ms."""
    published = figures_of("specmd", "table_1")[0].entry.published
    times = [each for each in published if each.value == "ttft_mean_ms"]
    return {each.model: float(low) for each in times for name, low, *_ in each.points if name == "baseline"}


def off(predicted: float, measured: float) -> float:
    """Return the error of a prediction, in percent of what was measured."""
    return 100 * (predicted / measured - 1)


def explained(found: list[Cell]) -> tuple[float, float]:
    """Return the R2 of model and configuration together on the reductions, and that of random numbers on average."""
    models, configurations = (sorted({cell[at] for cell in found}) for at in (0, 1))
    columns = [[1.0] * len(found)]
    columns += [[float(cell.model == name) for cell in found] for name in models[1:]]
    columns += [[float(cell.configuration == name) for cell in found] for name in configurations[1:]]
    design, saved = np.array(columns).T, np.array([cell.saved for cell in found])
    left = saved - design @ np.linalg.lstsq(design, saved, rcond=None)[0]
    return 1 - left @ left / ((saved - saved.mean()) @ (saved - saved.mean())), (design.shape[1] - 1) / (len(found) - 1)


def twice(found: list[Cell]) -> list[str]:
    """Return each TTFT that one model has under two configurations."""
    times = [(cell.model, f"{cell.configuration}{ls}", ms) for cell in found
             for ls, ms in (("", cell.before), (" with Least-Stale", cell.after))]  # fmt: skip
    return [
        f"{one[0]}: {one[2]} ms under {one[1]} and under {other[1]}"
        for one, other in combinations(times, 2)
        if one[0] == other[0] and one[2] == other[2]
    ]


def main() -> None:
    """Print the cells, the baselines and the contradictions."""
    found = cells()
    rows = [
        cell._asdict()
        | {"scan ms": cell.scan_ms, "error %": off(cell.scan_ms, cell.before)}
        | {
            "saved %": 100 * cell.saved,
            "fits %": 100 * cell.most,
            "more than fits": "yes" if cell.saved > cell.most else "",
        }
        for cell in found
    ]
    console().print(table(rows, title="SpecMD, Table 2: published TTFT and one scan of all experts"))
    scans = [abs(off(cell.scan_ms, cell.before)) for cell in found if cell.configuration != NO_SCAN]
    print(f"median error of the scan: {median(scans):.1f} % over {len(scans)} rows, at most {max(scans):.1f} %")
    wholes = {model: off(scan_ms(model, BASELINE_BITS), ms) for model, ms in baselines().items()}
    print(f"8-bit baseline: median error {median(map(abs, wholes.values())):.1f} %, {len(wholes)} models")
    above = [cell for cell in found if cell.saved > cell.most]
    print(f"reductions above the share that fits: {len(above)} of {len(found)}")
    together, chance = explained(found)
    print(f"R2 of model and configuration on the reductions: {together:.2f}; of random numbers {chance:.2f} on average")
    for line in twice(found):
        print(f"the same time twice: {line}")


if __name__ == "__main__":
    main()
