"""Expert counts of other tools, without token order. A format is a module with a `FORM`, and its name in `NAMES`."""

#: Formats in the order in which they are tried.
NAMES = ("imatrix", "coli_usage", "activation_matrix", "hot_cache", "activation_map", "count_table", "count_archive")
