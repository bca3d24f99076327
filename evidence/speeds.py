"""Compare `recommend` with published decoding speeds by kind of machine.

    python -m evidence.speeds FILE    # a run a row, as in ../shared/data/speeds/cells.csv

Each run is a setting of llama.cpp: with as many layers on the CPU as the author states, else the best one. Prints
measured and predicted tokens/s by run, and the median error and the share within 25 % by kind: unified memory,
resident (all experts on the card), hybrid (some on the CPU).
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

from moereplay.simulator.calibration import Tried
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.machine import assembled
from moereplay.sweeps.recommend.answer import Replays
from moereplay.sweeps.recommend.engines import engine
from moereplay.sweeps.recommend.load import Options, model_load
from moereplay.sweeps.recommend.settings import Setting, of_layers, setting_at, settings


class Compared(NamedTuple):
    """A run beside its prediction."""

    name: str
    kind: str
    machine: str
    measured: float  #: tokens/s
    predicted: float

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted / self.measured - 1

    @property
    def ratio(self) -> float:
        """Measured over predicted time."""
        return self.predicted / self.measured


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    runs, refused = published(parser.parse_args().file)
    print(*refused, sep="\n", end="\n" if refused else "")
    for run in sorted(runs, key=lambda run: (run.kind, run.error)):
        print(f"{run.kind:9} {run.name:24} {run.machine:24} {run.measured:8.1f} {run.predicted:8.1f} {run.error:+.0%}")
    print("\n".join(summary(runs)))


def published(file: Path) -> tuple[list[Compared], list[str]]:
    """Return the runs of a table beside their predictions, and why the others have none."""
    runs, refused = [], []
    with file.open(newline="") as stream:
        for row in csv.DictReader(stream):
            try:
                runs.append(compared(row))
            except ConfigError as why:
                refused.append(f"{row['id']}: {why}")
    return runs, refused


def summary(runs: list[Compared]) -> Iterator[str]:
    """Yield a line for each kind and one for all."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        by_kind[run.kind].append(run.error)
        by_kind["all"].append(run.error)
    for kind, errors in sorted(by_kind.items()):
        near = sum(abs(error) <= 0.25 for error in errors)
        yield f"{kind}: {len(errors)} runs, median error {median(map(abs, errors)):.0%}, {near} within 25 %"
    for kind, (inside, many) in within(runs).items():
        yield f"{kind}: {inside} of {many} runs lie in the range that runs of the other machines give for 4 of 5"


def within(runs: list[Compared]) -> dict[str, tuple[int, int]]:
    """Return by kind how many runs lie in the range that runs of other machines give for 4 of 5, and of how many.

    Kinds of fewer than four machines are left out.
    """
    found = {}
    for kind in sorted({run.kind for run in runs}):
        alike = [run for run in runs if run.kind == kind]
        if len({run.machine for run in alike}) > 3:
            inside = 0
            for run in alike:
                others = [other for other in alike if other.machine != run.machine]
                least, most = band(others).likely()
                inside += least <= run.ratio <= most
            found[kind] = (inside, len(alike))
    return found


def band(runs: list[Compared]) -> Tried:
    """Return what is stated of runs in an engine's profile."""
    ratios, machines = [run.ratio for run in runs], {run.machine for run in runs}
    least, middle, most = min(ratios), median(ratios), max(ratios)
    return Tried(runs=len(runs), least=least, median=middle, most=most, source="these", machines=len(machines))


def compared(row: Mapping[str, str]) -> Compared:
    """Return a run beside its prediction. Raises ConfigError."""
    load = model_load(row["model"], Options(context=int(row["context"] or 4096), quant=row["quant"]))
    machine = assembled(gpu=row["gpu"], ram=row["ram"], ram_rate=row["ram_rate"], cores=row["cores"])
    made, replays = engine("llama.cpp"), Replays(load)
    setting: Setting | None = None
    if row["n_cpu_moe"]:
        mode = next(mode for mode in made.modes if machine.kind in mode.machines)
        layers = load.geometry.layers - int(row["n_cpu_moe"])
        setting = next(setting_at(load, machine, made, mode, of_layers(load, layers), layers), None)
    setting = setting or replays.best([*settings(load, machine, made, ladder=True)])
    if setting is None:
        raise ConfigError("no setting fits")
    whole = setting.fast_bytes == load.expert_bytes
    kind = machine.kind if machine.kind != "gpu" else "resident" if whole else "hybrid"
    speed = replays.estimate(setting, whole=False).tokens_per_s.middle
    return Compared(row["id"], kind, row["gpu"], float(row["tokens_per_s"]), speed)


if __name__ == "__main__":
    main()
