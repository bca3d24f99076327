"""How far a configuration could be improved, counted from the demand: limits that no replay of its kind passes.

`fixed`: the best residents that never change. `least_time`: what links and compute take under any prefetch. `choices`
says which experts a router may choose among, `relaxation` counts misses that no such choice avoids, and `strategy`
those of one that can be made; `routed` puts the three together.
"""
