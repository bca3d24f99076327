"""Constants that traces, policies and engines share. Standard library only: policies may import it."""

PREFILL, DECODE = 0, 1  #: phase of a row of a pass
US, MS, SECOND = 1e3, 1e6, 1e9  #: in nanoseconds
MB, GB = 1e6, 1e9  #: in bytes
UNIT = 1 << 24  #: gate weights and scores are integers, round(weight * UNIT) half to even
NEVER = 1 << 60  #: next use of an expert that is not demanded again, and rank of one that a profile does not list
