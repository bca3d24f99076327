"""The figures and tables of papers, replayed from any trace: one file each, with its grid, its chart and its source.

Adding one is a file here that ends in `FIGURE = PaperFigure(...)`, and its name below.
"""

#: By the paper's name on the command line, which is that of the folder with hyphens; in the order of `--list`.
NAMES: dict[str, tuple[str, ...]] = {
    "specmd": (
        "collisions",
        "collisions_by_layer",
        "collision_ratio",
        "eviction_age",
        "hit_rate",
        "overfetch",
        "prefetch_precision",
        "miss_handling",
        "cache_aware_routing",
        "table_1",
        "table_2",
    ),
    "cache-conditional": (
        "rank_sensitivity",
        "miss_rate_quality",
        "miss_rate_lambda",
        "lifetimes",
        "cache_size",
        "device",
    ),
}
