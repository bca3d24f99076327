"""The readable engine, which is the specification: SimPy, one process per resource, integer nanoseconds.

`engine` tells compute's story, `link` the link's, `tier` keeps what is resident; `gate` is one indivisible event.
Events are ordered by (time, phase, issue number), LINK before CPU before COMPUTE.
"""

from simulator.reference.engine import run, run_with_state

__all__ = ["run", "run_with_state"]
