"""The CPU beside the accelerator: a step's misses that it computes from the slow tier, one after the other."""

from __future__ import annotations

from moereplay.simulator.compiled.clock import cpu_busy
from moereplay.simulator.compiled.errors import NO_CPU, fail
from moereplay.simulator.compiled.links import any_link_is_busy
from moereplay.simulator.compiled.log import BY_MISS, IS_CPU, span
from moereplay.simulator.compiled.served import ON_CPU
from moereplay.simulator.compiled.state import accesses, cost_row, cpu_ns, kind_of, slow_cpu_ns
from moereplay.simulator.jit.marks import called


@called
def start_cpu(s):
    """The CPU takes its share one after the other, beside link and compute."""
    after, contended = 0, any_link_is_busy(s)
    for i in range(s["gate"]["served"]):
        access = accesses(s)[i]
        if access["served"] == ON_CPU:
            if s["has_cpu"] == 0:
                fail(s, NO_CPU, 0)
                return
            size, tokens = cost_row(s)[kind_of(s, access["y"])], access["tokens"]
            spent = slow_cpu_ns(s)[size, tokens] if contended else cpu_ns(s)[size, tokens]
            span(s, IS_CPU, access["y"], after, spent, BY_MISS)
            after += spent
            cpu_busy(s, after)
