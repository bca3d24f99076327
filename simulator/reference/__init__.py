"""The readable engine, which is the specification of `docs/semantics.md`: SimPy, integer nanoseconds.

Read `compute` first, then `gate`, `link` and `cache`. Events are ordered by (time, phase, issue number), LINK before
CPU before COMPUTE (`clock`).
"""
