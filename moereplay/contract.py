"""What a policy file needs: `from moereplay.contract import Eviction, expert_of`.

`policies/contract.py` defines it, with every table, column and hook; docs/policies.md has an example of each kind.
"""

from moereplay.packages import check

check()

from moereplay.policies.contract import (  # noqa: E402
    ABSENT,
    CPU,
    DECODE,
    DROP,
    IN_FLIGHT,
    NEVER,
    NONE,
    PER_TOKEN,
    PREFILL,
    QUEUED,
    RESIDENT,
    UNIT,
    Choice,
    Eviction,
    HalfLife,
    Memory,
    Miss,
    Number,
    Numbers,
    PolicyError,
    Prefetch,
    Routing,
    always,
    expert_of,
    slot,
)

__all__ = [
    "ABSENT",
    "CPU",
    "DECODE",
    "DROP",
    "IN_FLIGHT",
    "NEVER",
    "NONE",
    "PER_TOKEN",
    "PREFILL",
    "QUEUED",
    "RESIDENT",
    "UNIT",
    "Choice",
    "Eviction",
    "HalfLife",
    "Memory",
    "Miss",
    "Number",
    "Numbers",
    "PolicyError",
    "Prefetch",
    "Routing",
    "always",
    "expert_of",
    "slot",
]
