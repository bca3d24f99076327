"""A platform as one run used it, and what a step of its model then takes."""

from __future__ import annotations

import numpy as np

from moereplay.calibration.closed_form import StepPrices, mean_waiting
from moereplay.calibration.runs import Run, Sizes
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Platform, Roofline
from moereplay.simulator.rates import NS

MS = 1e6  #: nanoseconds


def as_run(platform: Platform, run: Run) -> Platform:
    """The machine with the lanes and the overlap of the run; without a cache nothing is spent on loading."""
    lanes = {} if run.lanes is None else {"depth": run.lanes}
    changed: dict[str, object] = {
        "links": tuple(link.model_copy(update=lanes) for link in platform.links),
        "overlap": "none" if run.serial else platform.overlap if not run.cell.text("overlap") else "arrival",
        "calibration": None,
    }
    if not run.cached:
        changed["loading"] = platform.loading.model_copy(update={"ns_per_expert": 0, "ns_per_mib": 0})
    return platform.model_copy(update=changed)


def step_prices(machine: Platform, sizes: Sizes) -> StepPrices:
    """What one step of the model takes on that machine. Raises ConfigError for several links."""
    if len(machine.links) > 1:
        raise ConfigError(f"platform {machine.name} has several links; published bytes do not say which were used")
    link = next(iter(machine.links))
    size = round(sizes.expert_bytes)
    return StepPrices(
        k=sizes.k,
        load=machine.loading.ns(size),
        latency=link.idle_ns,
        start=link.start_ns,
        wire=link.wire_ns(size),
        depth=link.depth,
        expert=expert_ns(machine, sizes),
        waits_for_all=machine.overlap == "none",
    )


def expert_ns(machine: Platform, sizes: Sizes) -> float:
    """One expert for one token: its bytes at the rate of its format."""
    compute = machine.compute
    if not isinstance(compute, Roofline):
        return compute.expert_ns + compute.expert_ns_per_token
    rate = compute.formats.get(sizes.weight_format, compute.memory_bytes_per_s)
    return sizes.expert_bytes / rate * NS + compute.launch_ns


def compute_ms(machine: Platform, run: Run) -> float:
    """Per token: what is always read, the experts that it is routed to, and the gates' decisions."""
    sizes, compute = run.sizes, machine.compute
    experts = run.demand_bytes / sizes.expert_bytes * expert_ns(machine, sizes)
    gates = sizes.layers * machine.loading.gate_ns
    if not isinstance(compute, Roofline):
        return (compute.pass_ns + sizes.layers * compute.dense_ns + experts + gates) / MS
    dense = (sizes.dense_bytes or 0) / compute.memory_bytes_per_s * NS + sizes.layers * compute.launch_ns
    return (dense + experts + gates) / MS


def waiting_ms(machine: Platform, run: Run) -> np.ndarray:
    """(T,) what each token waits for the link."""
    return run.sizes.layers * mean_waiting(step_prices(machine, run.sizes), run.missed_share) / MS


def loading_ms(machine: Platform, run: Run) -> np.ndarray:
    """(T,) what each token spends on having experts loaded."""
    each = machine.loading.ns(round(run.sizes.expert_bytes))
    return run.missed_bytes / run.sizes.expert_bytes * each / MS
