"""Constants that traces, policies and engines share. Standard library only: policies may import it."""

PREFILL, DECODE = 0, 1  #: phase of a row of a pass
UNIT = 1 << 24  #: gate weights and scores are integers, round(weight * UNIT) half to even
NEVER = 1 << 60  #: next use of an expert that is not demanded again, and rank of one that a profile does not list
