"""Limits that no replay of a kind of configuration exceeds, counted from the demand.

`least_time` is the least time of links and compute under any prefetch. `choices` lists the experts that a router may
choose among, `relaxation` counts the misses that no such choice avoids, and `strategy` those of a feasible choice.
`limits` combines them and adds the best residents that never change.
"""
